-- the entry's fields if it is still pending for this worker, else nil; a lease of an entry that somebody deleted ends here
local function owned(stream, entry, worker)
  local found = redis.pcall('XPENDING', stream, 'generators', entry, entry, 1, worker)
  if found.err or #found == 0 then return nil end
  local p = fields(redis.call('XRANGE', stream, entry, entry)[1])
  if not p then settle(stream, entry) end
  return p
end
