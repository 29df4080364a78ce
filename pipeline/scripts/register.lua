-- keys: workers workers:info prompts prompts:retry
-- ARGV: worker, info. Also makes what a worker reads from, where it is missing.
redis.pcall('XGROUP', 'CREATE', prompts, 'generators', '0', 'MKSTREAM')
redis.pcall('XGROUP', 'CREATE', prompts_retry, 'generators', '0', 'MKSTREAM')
readopt()
redis.call('ZADD', workers, now(), ARGV[1])
redis.call('HSET', workers_info, ARGV[1], ARGV[2])
return 1
