-- 'ok' for the trainer that holds the run, 'older' where Redis knows less than it does, else 'fenced'
local function fence(epoch, token)
  local known = tonumber(redis.call('HGET', state, 'epoch') or 0)
  if known < tonumber(epoch) then return 'older' end
  if known == tonumber(epoch) and redis.call('HGET', state, 'token') == token then return 'ok' end
  return 'fenced'
end
