-- keys: prompts prompts:retry
-- flags: no-writes
-- Entries in the streams that nobody has leased.
local count = 0
for _, stream in ipairs({prompts, prompts_retry}) do
  count = count + redis.call('XLEN', stream) - (pending(stream) or 0)
end
return count
