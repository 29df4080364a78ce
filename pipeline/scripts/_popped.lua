-- push number of the newest group that has left the list: all unsettled up to it were popped
local function popped()
  return tonumber(redis.call('HGET', state, 'pushed') or 0) - redis.call('LLEN', groups)
end
