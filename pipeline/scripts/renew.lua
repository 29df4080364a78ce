-- keys: state
-- flags: allow-oom
-- ARGV: epoch, token, then fields and values to set. The trainer is alive. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
redis.call('HSET', state, 'trainer_seen', now(), unpack(ARGV, 3))
return {answer}
