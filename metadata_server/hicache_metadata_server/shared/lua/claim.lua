-- Where a scope's keys lie on another node than those of the idempotency keys: whether the key is free for this request, or is its own.
-- Returns 0 for another's, 1 for one that was its own before, 2 for a new one.
local held = redis.call('HGET', KEYS[1], 'digest')
if held then return held == ARGV[1] and 1 or 0 end
redis.call('HSET', KEYS[1], 'digest', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 2
