-- the entry's fields if it is still pending for this worker, else nil
local function owned(stream, entry, worker)
  local found = redis.pcall('XPENDING', stream, 'generators', entry, entry, 1, worker)
  if found.err or #found == 0 then return nil end
  return fields(redis.call('XRANGE', stream, entry, entry)[1])
end
