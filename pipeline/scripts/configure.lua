-- keys: state config
-- flags: allow-oom
-- ARGV: epoch, token, config. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer == 'ok' then redis.call('SET', config, ARGV[3]) end
return {answer}
