-- keys: evals:hold wake
-- flags: allow-oom
-- ARGV: version, milliseconds; 0: the evaluation has ended. Answers 1, or 0 where the engines are not held for that version.
if redis.call('HGET', evals_hold, 'version') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '0' then return redis.call('PEXPIRE', evals_hold, ARGV[2]) end
redis.call('DEL', evals_hold)
redis.call('PUBLISH', wake, 'version')
return 1
