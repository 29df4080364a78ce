-- keys: state wake
-- flags: allow-oom
-- ARGV: epoch, token, then fields and values to set. The trainer is alive; a new status is announced. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
redis.call('HSET', state, 'trainer_seen', now(), unpack(ARGV, 3))
for i = 3, #ARGV, 2 do
  if ARGV[i] == 'status' then redis.call('PUBLISH', wake, ARGV[i + 1]) end
  if ARGV[i] == 'doing' then redis.call('HSET', state, 'doing_since', now()) end
end
return {answer}
