-- keys: state feed prompts prompts:retry refeed groups open unsettled dead done:committed done:dropped done:dead counters config wake weights:version weights
-- flags: allow-oom
-- ARGV: epoch, token, reason, cursor to be at or above, bitmaps committed, dropped, dead of the trainer, config, version, number of weight
-- fields, the fields, then id, attempt, strikes, 'taken' or 'published', record of each prompt the trainer holds uncommitted.
-- Makes Redis agree with the trainer, which is the truth about what was trained: at a resume it holds nothing, after Redis came
-- back older, or lost a key, all that it took. Everything popped and not held goes round again. Answers {fence}.
local known = tonumber(redis.call('HGET', state, 'epoch') or 0)
if known > tonumber(ARGV[1]) or (known == tonumber(ARGV[1]) and redis.call('HGET', state, 'token') ~= ARGV[2]) then return {'fenced'} end
redis.pcall('XGROUP', 'CREATE', prompts, 'generators', '0', 'MKSTREAM')
redis.pcall('XGROUP', 'CREATE', prompts_retry, 'generators', '0', 'MKSTREAM')
redis.call('HSET', state, 'epoch', ARGV[1], 'token', ARGV[2], 'trainer_seen', now())
if ARGV[8] ~= '' then redis.call('SET', config, ARGV[8]) end

local function merge(key, bits)
  if #bits == 0 then return end
  redis.call('SET', key .. ':merge', bits)
  redis.call('BITOP', 'OR', key, key, key .. ':merge')
  redis.call('DEL', key .. ':merge')
end
redis.call('DEL', done_committed)
merge(done_committed, ARGV[5])
merge(done_dropped, ARGV[6])
merge(done_dead, ARGV[7])
-- what workers ended meanwhile, not knowing that it was trained, has not ended
local function except(key, bits)
  if redis.call('EXISTS', key) == 0 then return end
  redis.call('BITOP', 'AND', key .. ':merge', key, bits)
  redis.call('BITOP', 'XOR', key, key, key .. ':merge')
  redis.call('DEL', key .. ':merge')
end
except(done_dropped, done_committed)
except(done_dead, done_committed)

local held, last = {}, 10 + 2 * ARGV[10]
local was = redis.call('GET', feed)
local cursor = math.max(tonumber(was or 0), tonumber(ARGV[4]))
for i = last + 1, #ARGV, 5 do
  held[ARGV[i]] = i
  for _, bits in ipairs({done_dropped, done_dead}) do
    if redis.call('GETBIT', bits, ARGV[i]) == 1 then redis.call('SETBIT', bits, ARGV[i], 0) end
  end
  cursor = math.max(cursor, ARGV[i] + 1)
end
if tonumber(ARGV[9]) > 0 and tonumber(ARGV[9]) >= tonumber(redis.call('GET', weights_version) or 0) then
  redis.call('SET', weights_version, ARGV[9])
  redis.call('HSET', weights, 'version', ARGV[9], unpack(ARGV, 11, last))
end

for _, stream in ipairs({prompts, prompts_retry}) do
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    local id = proper(fields(entry).id) -- nil: somebody else's, for the worker that leases it
    if id and not was then cursor = math.max(cursor, id + 1) end -- else what is beyond was never fed
    if id and (held[id] or done(id)) then settle(stream, entry[1]) end
  end
end
for _, id in ipairs(redis.call('SMEMBERS', refeed)) do
  cursor = math.max(cursor, id + 1)
  if held[id] or done(id) then redis.call('SREM', refeed, id) end
end

for _, bits in ipairs({done_committed, done_dropped, done_dead}) do
  local text = redis.call('GET', bits) or ''
  for byte = #text, 1, -1 do
    local value = string.byte(text, byte)
    if value > 0 then
      local last_bit = 8 * byte
      while value % 2 == 0 do value, last_bit = value / 2, last_bit - 1 end
      cursor = math.max(cursor, last_bit)
      break
    end
  end
end

local rules, entries, newest = agreed(), {}, tonumber(redis.call('HGET', state, 'pushed') or 0)
local ids = redis.call('HKEYS', open)
for _, id in ipairs(ids) do
  local p = opened(id)
  p.id, entries[id] = id, p
  cursor, newest = math.max(cursor, id + 1), math.max(newest, p.push, redis.call('ZSCORE', unsettled, id) or 0)
end
for _, id in ipairs(redis.call('ZRANGE', unsettled, 0, -1)) do
  if not entries[id] then redis.call('ZREM', unsettled, id) end
end
redis.call('SET', feed, cursor)
redis.call('HSET', state, 'pushed', newest)
local gone = popped()
for _, id in ipairs(ids) do
  local p, ended = entries[id], done(id)
  local number = tonumber(redis.call('ZSCORE', unsettled, id) or p.push)
  if not held[id] and (ended or number <= gone) then
    redis.call('HDEL', open, id)
    redis.call('ZREM', unsettled, id)
    if not ended then again(p, ARGV[3], 'none', rules and rules.max_prompt_attempts or math.huge) end
  elseif not held[id] then
    redis.call('ZADD', unsettled, number, id)
  end
end
for id, i in pairs(held) do
  local number = redis.call('ZSCORE', unsettled, id) or '0'
  redis.call('HSET', open, id, '{"attempt":' .. ARGV[i + 1] .. ',"strikes":' .. ARGV[i + 2] .. ',"push":' .. number .. ',"prompt":' .. ARGV[i + 4] .. '}')
  if ARGV[i + 3] == 'taken' then redis.call('ZADD', unsettled, number, id) else redis.call('ZREM', unsettled, id) end
end
redis.call('PUBLISH', wake, 'version')
return {'ok'}
