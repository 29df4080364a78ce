-- keys: state groups groups:fenced alarm wake
-- flags: allow-oom
-- ARGV: epoch, token. First of MULTI; take_open; LPOP groups n; take_close; EXEC.
-- A trainer that is fenced, or has an alarm to read first, must pop nothing, and a failed script does not stop a MULTI: so the
-- list is renamed away until take_close. Unlike an LPOP in here, no payload enters Lua (1.4 to 2.5 times slower from 64 KB on).
local answer = fence(ARGV[1], ARGV[2])
if answer == 'ok' and redis.call('EXISTS', alarm) == 1 then answer = 'alarm' end
if answer ~= 'ok' and redis.call('EXISTS', groups) == 1 then redis.call('RENAME', groups, groups_fenced) end
if answer == 'ok' and redis.call('HDEL', state, 'full') == 1 then redis.call('PUBLISH', wake, 'space') end
return answer
