-- keys: state feed alarm prompts prompts:retry
-- flags: allow-oom
-- ARGV: token, name of the trainer, limit in ms, '1' to replace a living one, epoch to be above.
-- Done again by the trainer that holds the run (its reply was lost) it leaves the epoch as it is.
-- Answers {'ok', epoch} or {'held', name, ms since it was seen}.
local t = now()
local s = redis.call('HMGET', state, 'trainer', 'trainer_seen', 'epoch', 'token')
local since = t - tonumber(s[2] or 0)
local mine = s[4] == ARGV[1]
if not mine and ARGV[4] ~= '1' and math.abs(since) < tonumber(ARGV[3]) then return {'held', s[1] or '', since} end
redis.pcall('XGROUP', 'CREATE', prompts, 'generators', '0', 'MKSTREAM')
redis.pcall('XGROUP', 'CREATE', prompts_retry, 'generators', '0', 'MKSTREAM')
if not s[3] then redis.call('SETNX', feed, 0) end -- from now on it is always there: see _fed.lua
local epoch = tonumber(s[3] or 0)
if not mine then epoch = math.max(epoch, tonumber(ARGV[5])) + 1 end
redis.call('HSET', state, 'epoch', epoch, 'token', ARGV[1], 'trainer', ARGV[2], 'trainer_seen', t, 'status', 'starting', 'why', '', 'doing', 'starting', 'doing_since', t)
redis.call('DEL', alarm)
return {'ok', epoch}
