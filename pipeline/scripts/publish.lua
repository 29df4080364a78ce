-- keys: state weights:version weights unsettled wake
-- flags: allow-oom
-- ARGV: epoch, token, version, number of fields, field, value, ..., then the ids these weights were trained on.
-- Set if greater; the same publication again is no error. Room opens here and nowhere sooner. Answers {fence, version that stands}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
local known = tonumber(redis.call('GET', weights_version) or 0)
local version = tonumber(ARGV[3])
local last = 4 + 2 * ARGV[4]
local mine = {}
for i = 5, last, 2 do mine[ARGV[i]] = ARGV[i + 1] end
if version < known or (version == known and redis.call('HGET', weights, 'path') ~= mine.path) then return {'behind', known} end
for i = last + 1, #ARGV do redis.call('ZREM', unsettled, ARGV[i]) end
if version > known then
  redis.call('DEL', weights)
  redis.call('SET', weights_version, ARGV[3])
  redis.call('HSET', weights, 'version', ARGV[3], unpack(ARGV, 5, last))
  redis.call('HSET', state, 'published_at', now())
end
redis.call('PUBLISH', wake, 'version')
return {answer, version}
