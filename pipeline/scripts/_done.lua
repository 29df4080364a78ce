-- whether a prompt has ended already
local function done(id)
  return redis.call('GETBIT', done_committed, id) + redis.call('GETBIT', done_dropped, id) + redis.call('GETBIT', done_dead, id) > 0
end
