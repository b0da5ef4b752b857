-- Claims an idempotency key, for requests whose scopes are on other nodes of a cluster than the
-- key.
-- Returns 0 if another request has it, 1 if this request has claimed it before, 2 if it is new.
local held = redis.call('HGET', KEYS[1], 'digest')
if held then return held == ARGV[1] and 1 or 0 end
redis.call('HSET', KEYS[1], 'digest', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 2
