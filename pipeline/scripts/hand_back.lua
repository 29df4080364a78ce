-- keys: prompts prompts:retry dead done:committed done:dropped done:dead counters config unsettled wake workers:spare feed
-- flags: allow-oom
-- ARGV: worker, reason, fault ('none', 'strike', 'bury' or 'drop'), then 'retry' or 'fresh' and stream id of each entry.
-- Only entries still pending for the worker are touched. Answers how many.
local rules = agreed()
local limit = rules and rules.max_prompt_attempts or math.huge
local before, count = room(rules), 0
for i = 4, #ARGV, 2 do
  local stream = ARGV[i] == 'retry' and prompts_retry or prompts
  local p = owned(stream, ARGV[i + 1], ARGV[1])
  if p then
    settle(stream, ARGV[i + 1])
    again(p, ARGV[2], ARGV[3], limit)
    count = count + 1
  end
end
if count > 0 then redis.call('HDEL', workers_spare, ARGV[1]) end -- theirs are among them; the next lease tells the rest
if count > 0 and before and before <= 0 then redis.call('PUBLISH', wake, 'room') end
return count
