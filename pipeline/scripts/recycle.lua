-- keys: state open unsettled prompts prompts:retry dead done:committed done:dropped done:dead counters config wake feed
-- flags: allow-oom
-- ARGV: epoch, token, reason, fault, then id and attempt of each. Answers {fence, how many}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
local rules = agreed()
local before, count = room(rules), 0
for i = 5, #ARGV, 2 do
  local p = opened(ARGV[i])
  if p and p.attempt == ARGV[i + 1] then
    redis.call('HDEL', open, ARGV[i])
    redis.call('ZREM', unsettled, ARGV[i])
    p.id = ARGV[i]
    again(p, ARGV[3], ARGV[4], rules and rules.max_prompt_attempts or math.huge)
    count = count + 1
  end
end
if count > 0 and before and before <= 0 then redis.call('PUBLISH', wake, 'room') end
return {answer, count}
