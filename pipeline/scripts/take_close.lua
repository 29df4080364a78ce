-- keys: groups groups:fenced
-- flags: allow-oom
-- Undoes what take_open may have done.
if redis.call('EXISTS', groups_fenced) == 1 then redis.call('RENAME', groups_fenced, groups) end
return 1
