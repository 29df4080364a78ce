-- keys: state workers workers:info workers:spare prompts prompts:retry dead done:committed done:dropped done:dead counters config unsettled wake feed
-- flags: allow-oom
-- Sends what silent workers hold round again, with a strike; anyone may call it, every few seconds. Answers their names.
-- Nobody is reaped for one limit after a gap in the ticks or a clock that went back: a paused Redis makes all look silent.
local rules = agreed()
local limit = rules and rules.heartbeat_limit_ms or 20000
local t = now()
local tick = tonumber(redis.call('HGET', state, 'tick') or 0)
redis.call('HSET', state, 'tick', t)
readopt()
-- what was heard before the clock went back must not count as life until the clock is there again
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. t, '+inf')) do redis.call('ZADD', workers, t, worker) end
if t < tick or t - tick > limit / 2 then redis.call('HSET', state, 'grace', t + limit) end
if t < tonumber(redis.call('HGET', state, 'grace') or 0) then return {} end

local gone, before, moved = {}, room(rules), 0
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', t - limit, 'LIMIT', 0, 4)) do
  local left = false
  for _, stream in ipairs({prompts, prompts_retry}) do
    local held = redis.pcall('XPENDING', stream, 'generators', '-', '+', 256, worker)
    if not held.err then
      for _, entry in ipairs(held) do
        local p = fields(redis.call('XRANGE', stream, entry[1], entry[1])[1])
        settle(stream, entry[1])
        if p then again(p, 'worker_died', 'strike', rules and rules.max_prompt_attempts or math.huge) end
        moved = moved + 1
      end
      if #held < 256 then redis.pcall('XGROUP', 'DELCONSUMER', stream, 'generators', worker) else left = true end
    end
  end
  if not left then
    redis.call('ZREM', workers, worker)
    redis.call('HDEL', workers_info, worker)
    redis.call('HDEL', workers_spare, worker)
    gone[#gone + 1] = worker
  end
end
if moved > 0 and before and before <= 0 then redis.call('PUBLISH', wake, 'room') end
return gone
