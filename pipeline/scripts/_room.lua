-- groups that may still be leased; nil where config or a consumer group is gone
local function room(agreed)
  local fresh, again = pending(prompts), pending(prompts_retry)
  if not (agreed and fresh and again) then return nil end
  local finished, bound = redis.call('ZCARD', unsettled), agreed.bound
  local slack = agreed.slack or 0
  if finished >= 2 * slack then bound = bound - slack end -- a batch is trained on, the next is complete
  return bound - fresh - again - finished, fresh + again
end
