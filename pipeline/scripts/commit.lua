-- keys: state open unsettled done:committed counters
-- flags: allow-oom
-- ARGV: epoch, token, then id and attempt of each prompt that a complete checkpoint contains.
-- Answers {fence, ids refused: neither open under that attempt nor committed before}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
local refused = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local p = opened(id)
  if p and p.attempt == ARGV[i + 1] then
    redis.call('HDEL', open, id)
    redis.call('ZREM', unsettled, id)
    if redis.call('SETBIT', done_committed, id, 1) == 0 then
      redis.call('HINCRBY', counters, 'committed', 1)
    else
      redis.call('HINCRBY', counters, 'refused:double', 1)
    end
  elseif redis.call('GETBIT', done_committed, id) == 0 then
    refused[#refused + 1] = id
  end
end
return {answer, refused}
