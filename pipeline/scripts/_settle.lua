-- the stream is done with an entry
local function settle(stream, entry)
  redis.call('XACK', stream, 'generators', entry)
  redis.call('XDEL', stream, entry)
end
