-- where `workers` was lost, all who may hold prompts count as heard just now: the dead are found once more
local function readopt()
  if redis.call('EXISTS', workers) == 1 then return end
  for _, stream in ipairs({prompts, prompts_retry}) do
    local found = redis.pcall('XINFO', 'CONSUMERS', stream, 'generators')
    for _, consumer in ipairs(found.err and {} or found) do
      for i = 1, #consumer, 2 do
        if consumer[i] == 'name' then redis.call('ZADD', workers, now(), consumer[i + 1]) end
      end
    end
  end
end
