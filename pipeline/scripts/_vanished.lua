-- what Redis has lost while this trainer lived (a key, a consumer group, prompts that stand nowhere); nil for nothing.
-- trained: groups published upon and in no checkpoint; version: the newest this trainer published.
local function vanished(trained, version)
  if redis.call('EXISTS', config) == 0 then return config end
  if redis.call('EXISTS', feed) == 0 then return feed end
  if tonumber(redis.call('GET', weights_version) or 0) < version then return weights_version end
  if version > 0 and redis.call('EXISTS', weights) == 0 then return weights end
  for _, stream in ipairs({prompts, prompts_retry}) do
    if not pending(stream) then return 'the consumer group of ' .. stream end
  end
  local opened = redis.call('HLEN', open)
  if opened ~= redis.call('ZCARD', unsettled) + trained then return 'entries of ' .. open .. ' or ' .. unsettled end
  local found = opened + redis.call('XLEN', prompts) + redis.call('XLEN', prompts_retry) + redis.call('SCARD', refeed)
  for _, bits in ipairs({done_committed, done_dropped, done_dead}) do found = found + redis.call('BITCOUNT', bits) end
  local missing = redis.call('GET', feed) - found
  if missing > 0 then return missing .. ' prompts: they stand nowhere' end
end
