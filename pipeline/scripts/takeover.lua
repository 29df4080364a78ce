-- keys: state alarm prompts prompts:retry
-- ARGV: token, name of the trainer, limit in ms, '1' to replace a living one, epoch to be above.
-- Answers {'ok', epoch} or {'held', name, ms since it was seen}.
local t = now()
local s = redis.call('HMGET', state, 'trainer', 'trainer_seen', 'epoch')
local since = t - tonumber(s[2] or 0)
if ARGV[4] ~= '1' and since >= 0 and since < tonumber(ARGV[3]) then return {'held', s[1] or '', since} end
redis.pcall('XGROUP', 'CREATE', prompts, 'generators', '0', 'MKSTREAM')
redis.pcall('XGROUP', 'CREATE', prompts_retry, 'generators', '0', 'MKSTREAM')
local epoch = math.max(tonumber(s[3] or 0), tonumber(ARGV[5])) + 1
redis.call('HSET', state, 'epoch', epoch, 'token', ARGV[1], 'trainer', ARGV[2], 'trainer_seen', t, 'status', 'starting', 'why', '')
redis.call('DEL', alarm)
return {'ok', epoch}
