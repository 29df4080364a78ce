-- prompts fed so far; an error where that is lost: since a trainer took the run over it is always there
local function fed()
  local cursor = redis.call('GET', feed)
  if not cursor and redis.call('HEXISTS', state, 'epoch') == 1 then return redis.error_reply('LOST ' .. feed) end
  return tonumber(cursor or 0)
end
