-- keys: state weights:version weights:roster
-- flags: allow-oom
-- ARGV: epoch, token, version, roster. Who takes part in this version's update over a process group, while that version stands. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer == 'ok' and redis.call('GET', weights_version) == ARGV[3] then redis.call('SET', weights_roster, ARGV[4]) end
return {answer}
