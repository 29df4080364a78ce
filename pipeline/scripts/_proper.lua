-- an id, nil where it can be none of ours: a bitmap has no bit for it
local function proper(id)
  local written = id == '0' or string.match(id or '', '^[1-9]%d*$')
  return written and tonumber(id) < 4294967296 and id or nil
end
