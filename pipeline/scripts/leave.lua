-- keys: workers workers:info workers:spare prompts prompts:retry
-- flags: allow-oom
-- ARGV: worker. A worker that holds nothing any more goes; one that holds something is left to the reaper. Answers 1 or 0.
for _, stream in ipairs({prompts, prompts_retry}) do
  local held = redis.pcall('XPENDING', stream, 'generators', '-', '+', 1, ARGV[1])
  if not held.err and #held > 0 then return 0 end
end
redis.pcall('XGROUP', 'DELCONSUMER', prompts, 'generators', ARGV[1])
redis.pcall('XGROUP', 'DELCONSUMER', prompts_retry, 'generators', ARGV[1])
redis.call('ZREM', workers, ARGV[1])
redis.call('HDEL', workers_info, ARGV[1])
redis.call('HDEL', workers_spare, ARGV[1])
return 1
