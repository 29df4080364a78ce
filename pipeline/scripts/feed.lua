-- keys: feed state prompts counters wake
-- ARGV: cursor the feeder believes in, then one JSON record a prompt.
-- Compare-and-set on the cursor, so two feeders cannot feed twice. Answers the cursor as it is now.
local cursor = fed()
if type(cursor) == 'table' then return cursor end
if cursor ~= tonumber(ARGV[1]) then return cursor end
local dry = redis.call('XLEN', prompts) == (pending(prompts) or 0)
redis.call('INCRBY', feed, #ARGV - 1) -- first: where the log ends in between, they are missing, and not nobody's
for i = 2, #ARGV do
  redis.call('XADD', prompts, '*', 'id', cursor + i - 2, 'attempt', 1, 'strikes', 0, 'prompt', ARGV[i])
end
redis.call('HINCRBY', counters, 'fed', #ARGV - 1)
if dry then redis.call('PUBLISH', wake, 'prompts') end
return cursor + #ARGV - 1
