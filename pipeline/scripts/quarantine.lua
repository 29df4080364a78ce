-- keys: quarantine
-- flags: allow-oom
-- ARGV: what the trainer says of a message that would not decode: field, value, ...
return redis.call('XADD', quarantine, 'MAXLEN', '~', 1000, '*', unpack(ARGV))
