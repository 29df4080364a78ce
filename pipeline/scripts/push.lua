-- keys: groups groups:sizes open unsettled prompts prompts:retry done:committed done:dropped done:dead state counters config workers:spare feed
-- ARGV: 'retry' or 'fresh', stream id, worker, id, attempt, size in bytes.
-- Runs right after RPUSH groups in one MULTI; the payload never enters Lua. Answers 'pushed', 'full' or 'lost'; all but
-- the first 'pushed' take the payload out again.
local stream = ARGV[1] == 'retry' and prompts_retry or prompts
local size = tonumber(ARGV[6])
local function undo(answer)
  redis.call('LTRIM', groups, 0, -2)
  return answer
end

local p = owned(stream, ARGV[2], ARGV[3])
if not p or p.id ~= ARGV[4] or p.attempt ~= ARGV[5] then
  local before = opened(ARGV[4])
  local same = before and before.attempt == ARGV[5]
  return undo((same or redis.call('GETBIT', done_committed, ARGV[4]) == 1) and 'pushed' or 'lost')
end
local alien = tonumber(p.id) >= tonumber(redis.call('GET', feed) or math.huge) -- it was never fed
if alien or done(p.id) then
  settle(stream, ARGV[2])
  redis.call('HINCRBY', counters, alien and 'refused:alien' or 'refused:double', 1)
  return undo('lost')
end
local rules = agreed()
if not rules or redis.call('HEXISTS', state, 'epoch') == 0 then return undo('full') end -- lost: the trainer sets it again

local before = redis.call('LLEN', groups) - 1
if before == 0 then redis.call('DEL', groups_sizes) else redis.call('LTRIM', groups_sizes, -before, -1) end
local first, last = redis.call('LINDEX', groups_sizes, 0), redis.call('LINDEX', groups_sizes, -1)
local total = last and tonumber(string.match(last, ' (%d+)')) or 0
local oldest_size, oldest_total = string.match(first or '0 0', '(%d+) (%d+)')
local waiting = total - oldest_total + oldest_size
if redis.call('LLEN', groups_sizes) < before then -- sizes were lost: what the list takes up is measured
  waiting = math.max(waiting, (tonumber(redis.pcall('MEMORY', 'USAGE', groups, 'SAMPLES', 0)) or 0) - size)
end
if before >= rules.queue_capacity or (before > 0 and waiting + size > rules.queue_max_bytes) then
  redis.call('HSET', state, 'full', 1)
  return undo('full')
end

settle(stream, ARGV[2])
redis.call('HDEL', workers_spare, ARGV[3]) -- its samples are among them; the worker's next lease tells what is left
local number = redis.call('HINCRBY', state, 'pushed', 1)
redis.call('RPUSH', groups_sizes, string.format('%d %.0f', size, total + size))
redis.call('HSET', open, p.id, '{"attempt":' .. p.attempt .. ',"strikes":' .. p.strikes .. ',"push":' .. number .. ',"prompt":' .. p.prompt .. '}')
redis.call('ZADD', unsettled, number, p.id)
redis.call('HSET', state, 'pushed_at', now())
redis.call('HINCRBY', counters, 'pushed', 1)
return 'pushed'
