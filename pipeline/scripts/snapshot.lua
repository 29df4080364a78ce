-- keys: feed refeed prompts prompts:retry groups open unsettled done:committed done:dropped done:dead state
-- flags: no-writes
-- Where every prompt stands, at one instant; for the audit and for finding what is missing. Answers
-- {feed, committed, dropped, dead, stream ids, open ids, {unsettled id, push number, ...}, refeed ids, popped, list length, pending}.
local waiting = {}
for _, stream in ipairs({prompts, prompts_retry}) do
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do waiting[#waiting + 1] = proper(fields(entry).id) end
end
return {redis.call('GET', feed) or '0', redis.call('GET', done_committed) or '', redis.call('GET', done_dropped) or '',
  redis.call('GET', done_dead) or '', waiting, redis.call('HKEYS', open), redis.call('ZRANGE', unsettled, 0, -1, 'WITHSCORES'),
  redis.call('SMEMBERS', refeed), popped(), redis.call('LLEN', groups), (pending(prompts) or 0) + (pending(prompts_retry) or 0)}
