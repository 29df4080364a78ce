-- keys: state wake
-- flags: allow-oom
-- ARGV: epoch, token, then fields and values to set. The trainer is alive; a new status is announced. A trainer that has
-- said its last word (trainer_seen 0) is not alive again because its pulse comes once more. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
local told = {}
for i = 3, #ARGV, 2 do told[ARGV[i]] = ARGV[i + 1] end
if not told.status and redis.call('HGET', state, 'trainer_seen') == '0' then return {answer} end
redis.call('HSET', state, 'trainer_seen', now(), unpack(ARGV, 3))
if told.status then redis.call('PUBLISH', wake, told.status) end
if told.doing then redis.call('HSET', state, 'doing_since', now()) end
return {answer}
