-- keys: refeed prompts:retry counters wake
-- ARGV: id, record, id, record... Sends each id that a restore found missing once more.
local sent = 0
for i = 1, #ARGV, 2 do
  if redis.call('SREM', refeed, ARGV[i]) == 1 then
    redis.call('XADD', prompts_retry, '*', 'id', ARGV[i], 'attempt', 1, 'strikes', 0, 'prompt', ARGV[i + 1])
    sent = sent + 1
  end
end
if sent > 0 then
  redis.call('HINCRBY', counters, 'refed', sent)
  redis.call('PUBLISH', wake, 'prompts')
end
return sent
