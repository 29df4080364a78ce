-- keys: prompts prompts:retry
-- flags: no-writes
-- Every lease, for people and the audit: answers {'retry' or 'fresh', stream id, worker, ms since it was leased, prompt id}
-- of each; the prompt id is '' where the entry itself is gone.
local leases = {}
for _, where in ipairs({{'retry', prompts_retry}, {'fresh', prompts}}) do
  local held = redis.pcall('XPENDING', where[2], 'generators', '-', '+', 1000000)
  for _, lease in ipairs(held.err and {} or held) do
    local p = fields(redis.call('XRANGE', where[2], lease[1], lease[1])[1])
    leases[#leases + 1] = {where[1], lease[1], lease[2], lease[3], p and proper(p.id) or ''}
  end
end
return leases
