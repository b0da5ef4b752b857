-- How many slots of a scope are not free, and what the scope is made of. A scope that has none is removed, if asked for.
local LAST_SECONDS = 86400 -- until then this clock has caught up with one that was ahead
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local remove = unpack(cmsgpack.unpack(ARGV[3]), 1, 1)
settle()
local used = call('ZCARD', ORDER) + call('ZCARD', ASIDE) + call('ZCARD', EXPIRING) + count_resting()
-- Earlier leases may still be written by: nobody who may not know of them is to make the scope anew.
if is_closed() then used = tonumber(call('HGET', META, 'slots')) end
local record = call('HMGET', META, 'slots', 'slot_bytes', 'geometry', 'identity', 'tenant')
if used == 0 and remove then
  -- A replica that takes over may have a clock that is behind: what is made anew goes on with the numbers.
  call('SET', META .. ':last', call('HGET', META, 'lease'), 'EX', LAST_SECONDS)
  call('UNLINK', META .. ':replicated', unpack(KEYS, 1, 15))
end
return {OK, cmsgpack.pack({used, record})}
