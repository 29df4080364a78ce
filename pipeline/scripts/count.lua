-- keys: counters
-- flags: allow-oom
-- ARGV: name of a counter.
return redis.call('HINCRBY', counters, ARGV[1], 1)
