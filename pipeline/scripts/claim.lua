-- keys: evals:engines
-- flags: allow-oom
-- ARGV: worker, milliseconds, url, ...: the worker alone evaluates on these servers for so long, or until it says 0.
-- Answers nothing where that is so, else who does.
local ends = now() + ARGV[2]
for i = 3, #ARGV do
  local who, till = string.match(redis.call('HGET', evals_engines, ARGV[i]) or '', '^(%S+) (%d+)$')
  if who and who ~= ARGV[1] and tonumber(till) > now() then return who end
end
for i = 3, #ARGV do
  if ARGV[2] == '0' then
    redis.call('HDEL', evals_engines, ARGV[i])
  else
    redis.call('HSET', evals_engines, ARGV[i], ARGV[1] .. ' ' .. string.format('%d', ends))
  end
end
if redis.call('PTTL', evals_engines) < tonumber(ARGV[2]) then redis.call('PEXPIRE', evals_engines, ARGV[2]) end
return ''
