-- keys: workers workers:info workers:spare state weights:version
-- flags: allow-oom
-- ARGV: worker, info, spare samples. Answers {'ok' or 'reaped', status, paused, version}.
if not redis.call('ZSCORE', workers, ARGV[1]) then return {'reaped'} end
redis.call('ZADD', workers, now(), ARGV[1])
redis.call('HSET', workers_info, ARGV[1], ARGV[2])
if ARGV[3] == '0' then redis.call('HDEL', workers_spare, ARGV[1]) else redis.call('HSET', workers_spare, ARGV[1], ARGV[3]) end
local s = redis.call('HMGET', state, 'status', 'paused')
return {'ok', s[1] or '', s[2] or '', redis.call('GET', weights_version) or ''}
