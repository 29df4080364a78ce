-- keys: state refeed
-- flags: allow-oom
-- ARGV: epoch, token, then ids that stand nowhere. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
for i = 3, #ARGV do redis.call('SADD', refeed, ARGV[i]) end
return {answer}
