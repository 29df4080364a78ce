-- One more round for a prompt, or its end. fault: 'none', 'strike' (its own fault), 'bury' (at once) or 'drop'.
-- Frees before it is called, so it works at maxmemory. Answers true when the prompt waits again.
local function again(p, reason, fault, limit)
  local known = proper(p.id) and tonumber(p.id) < tonumber(redis.call('GET', feed) or math.huge)
  if not (known and tonumber(p.attempt) and tonumber(p.strikes) and p.prompt) then
    redis.call('HINCRBY', counters, 'refused:alien', 1) -- no prompt of this run, or never fed: somebody else's entry
    return false
  end
  if done(p.id) then
    redis.call('HINCRBY', counters, 'refused:double', 1)
    return false
  end
  if fault == 'drop' then
    redis.call('SETBIT', done_dropped, p.id, 1)
    redis.call('HINCRBY', counters, 'dropped:' .. reason, 1)
    return false
  end
  local strikes = tonumber(p.strikes)
  if fault ~= 'none' then
    strikes = strikes + 1
    redis.call('HINCRBY', counters, 'strikes:' .. reason, 1)
  end
  if fault == 'bury' or (fault == 'strike' and strikes >= limit) then
    redis.call('SETBIT', done_dead, p.id, 1)
    redis.call('HINCRBY', counters, 'dead:' .. reason, 1)
    redis.call('XADD', dead, 'MAXLEN', '~', 10000, '*', 'id', p.id, 'attempt', p.attempt, 'strikes', strikes, 'reason', reason, 'prompt', p.prompt)
    return false
  end
  local entry = {'id', p.id, 'attempt', p.attempt + 1, 'strikes', strikes, 'prompt', p.prompt}
  -- a worker died of it, perhaps, and not for the first time: from now on its kind is leased one at a time
  if p.alone or (reason == 'worker_died' and strikes + 1 >= math.min(3, limit)) then entry[9], entry[10] = 'alone', 1 end
  redis.call('XADD', prompts_retry, '*', unpack(entry))
  redis.call('HINCRBY', counters, 'recycled:' .. reason, 1)
  return true
end
