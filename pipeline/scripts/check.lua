-- keys: state groups open unsettled prompts prompts:retry refeed feed dead done:committed done:dropped done:dead counters config wake weights:version weights
-- flags: allow-oom
-- ARGV: epoch, token, reason, fault, how many it has published upon and not committed, the version it published last, then id
-- and attempt of all it holds and has not published upon. Where Redis has lost something: {'older', what}.
-- Popped groups that it does not hold are lost and go round again. Answers
-- {fence, ids lost, ids held that are not open under that attempt, entries in the streams, groups in the list, ids to feed again, feed, feed_total}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
local lost_here = vanished(tonumber(ARGV[5]), tonumber(ARGV[6]))
if lost_here then return {'older', lost_here} end
local rules = agreed()
local limit = rules and rules.max_prompt_attempts or math.huge
local held, foreign, lost = {}, {}, {}
for i = 7, #ARGV, 2 do
  local p = opened(ARGV[i])
  if p and p.attempt == ARGV[i + 1] then held[ARGV[i]] = true else foreign[#foreign + 1] = ARGV[i] end
end
local before = room(rules)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', unsettled, '-inf', popped())) do
  if not held[id] then
    local p = opened(id)
    redis.call('ZREM', unsettled, id)
    redis.call('HDEL', open, id)
    if p then p.id = id; again(p, ARGV[3], ARGV[4], limit) end
    lost[#lost + 1] = id
  end
end
if #lost > 0 and before and before <= 0 then redis.call('PUBLISH', wake, 'room') end
return {answer, lost, foreign, redis.call('XLEN', prompts) + redis.call('XLEN', prompts_retry), redis.call('LLEN', groups),
  redis.call('SCARD', refeed), redis.call('GET', feed) or '0', redis.call('HGET', state, 'feed_total') or ''}
