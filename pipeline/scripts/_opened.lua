-- an `open` value taken apart, the record untouched; nil where there is none
local function opened(id)
  local value = redis.call('HGET', open, id)
  if not value then return nil end
  local attempt, strikes, push, prompt = string.match(value, '^{"attempt":(%d+),"strikes":(%d+),"push":(%d+),"prompt":(.*)}$')
  return {attempt = attempt, strikes = strikes, push = push, prompt = prompt}
end
