-- an id, nil where it can be none of ours: a bitmap has no bit for it
local function proper(id)
  return string.match(id or '', '^%d+$') and tonumber(id) < 4294967296 and id or nil
end
