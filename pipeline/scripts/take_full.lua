-- keys: state groups alarm
-- flags: allow-oom
-- ARGV: epoch, token, how many. take_open, LPOP and take_close in one, for a Redis that queues nothing for a MULTI at maxmemory (7.0):
-- the payload goes through Lua. Answers {fence, {group, ...}}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
if redis.call('EXISTS', alarm) == 1 then return {answer, {}} end
return {answer, redis.call('LPOP', groups, ARGV[3]) or {}}
