-- keys: state evals:hold
-- flags: allow-oom
-- ARGV: epoch, token, milliseconds, field, value, ...: weights that an evaluation is to have the engines for. Until it has
-- ended, or nobody has renewed this for so long, nothing is leased and no newer weights are loaded. Answers {fence}.
local answer = fence(ARGV[1], ARGV[2])
if answer ~= 'ok' then return {answer} end
redis.call('DEL', evals_hold)
redis.call('HSET', evals_hold, unpack(ARGV, 4))
redis.call('PEXPIRE', evals_hold, ARGV[3])
return {answer}
