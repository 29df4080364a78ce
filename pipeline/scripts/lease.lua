-- keys: config state prompts prompts:retry workers workers:spare unsettled weights:version weights evals:hold
-- ARGV: worker, how many it wants, its spare samples (finished, of groups that are not), 1 if it holds a prompt that goes alone,
-- digest of the config that it works by ('': of any).
-- Answers {'ok', version, room, {entry, ...}}, {'wait', why} or {'reaped'}; an entry is {'retry' or 'fresh', stream id, fields}.
if not redis.call('ZSCORE', workers, ARGV[1]) then return {'reaped'} end
local rules = agreed()
local s = redis.call('HMGET', state, 'status', 'paused')
if not rules or s[1] ~= 'running' then return {'wait', s[1] or 'no trainer'} end
if s[2] and s[2] ~= '' then return {'wait', 'paused'} end
if ARGV[5] ~= '' and ARGV[5] ~= rules.digest then return {'wait', 'other config'} end
if redis.call('EXISTS', evals_hold) == 1 then return {'wait', 'evaluation'} end
if redis.call('EXISTS', weights_version, weights) < 2 then return {'wait', 'no weights'} end
local left, leased = room(rules)
if not left then return {'wait', 'no group'} end

redis.call('ZADD', workers, now(), ARGV[1])
if ARGV[3] == '0' then redis.call('HDEL', workers_spare, ARGV[1]) else redis.call('HSET', workers_spare, ARGV[1], ARGV[3]) end
local spare = 0
for _, samples in ipairs(redis.call('HVALS', workers_spare)) do spare = spare + samples end
local flight = rules.in_flight + math.floor(spare / rules.n_samples_per_prompt) - leased
local want = math.min(tonumber(ARGV[2]), left, flight)

local entries = {}
local function read(stream, name, count)
  if count <= 0 then return end
  local got = redis.call('XREADGROUP', 'GROUP', 'generators', ARGV[1], 'COUNT', count, 'STREAMS', stream, '>')
  if not got then return end
  for _, entry in ipairs(got[1][2]) do entries[#entries + 1] = {name, entry[1], entry[2]} end
end
local function retries() -- how many of those that go round again: up to the second that goes alone
  if want <= 0 then return 0 end
  local _, last = pending(prompts_retry)
  local count, alone = 0, ARGV[4] == '1'
  for _, entry in ipairs(redis.call('XRANGE', prompts_retry, '(' .. last, '+', 'COUNT', want)) do
    local goes_alone = fields(entry).alone
    if goes_alone and alone then break end
    alone = alone or goes_alone
    count = count + 1
  end
  return count
end
read(prompts_retry, 'retry', retries())
read(prompts, 'fresh', want - #entries)
return {'ok', redis.call('GET', weights_version) or '', left - #entries, entries}
