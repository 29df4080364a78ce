-- an id, nil where it can be none of ours: it was not fed yet, or, where that is lost, a bitmap has no bit for it
local function proper(id)
  local written = id == '0' or string.match(id or '', '^[1-9]%d*$')
  return written and tonumber(id) < tonumber(redis.call('GET', feed) or 4294967296) and id or nil
end
