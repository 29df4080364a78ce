-- entries leased and not settled, and the last one ever leased; nil where the stream or its consumer group is gone
local function pending(stream)
  local found = redis.pcall('XINFO', 'GROUPS', stream)
  if found.err then return nil end
  for _, group in ipairs(found) do
    local name, count, last
    for i = 1, #group, 2 do
      if group[i] == 'name' then name = group[i + 1] end
      if group[i] == 'pending' then count = group[i + 1] end
      if group[i] == 'last-delivered-id' then last = group[i + 1] end
    end
    if name == 'generators' then return tonumber(count), last end
  end
end
