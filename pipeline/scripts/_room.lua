-- groups that may still be leased; nil where config or a consumer group is gone
local function room(agreed)
  local fresh, again = pending(prompts), pending(prompts_retry)
  if not (agreed and fresh and again) then return nil end
  return agreed.bound - fresh - again - redis.call('ZCARD', unsettled), fresh + again
end
