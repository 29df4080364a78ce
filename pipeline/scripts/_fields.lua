-- a stream entry as a table; nil for nothing
local function fields(entry)
  if not entry then return nil end
  local map = {}
  for i = 1, #entry[2], 2 do map[entry[2][i]] = entry[2][i + 1] end
  return map
end
