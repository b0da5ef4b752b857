-- Returns the number of slots that are not free, and the record of the scope. Removes a scope
-- without such slots, if asked to.
local LAST_SECONDS = 86400 -- by then a slow clock has passed the numbers that a fast one gave
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local remove = unpack(cmsgpack.unpack(ARGV[3]), 1, 1)
settle()
local used = call('ZCARD', ORDER) + call('ZCARD', ASIDE) + call('ZCARD', EXPIRING) + count_resting()
-- Writers with earlier leases may still write: a scope that is created again now would not know of
-- them.
if is_closed() then used = tonumber(call('HGET', META, 'slots')) end
local record = call('HMGET', META, 'slots', 'slot_bytes', 'geometry', 'identity', 'tenant')
if used == 0 and remove then
  -- A replica that takes over may have a slow clock: a scope of this name continues with the lease
  -- numbers.
  call('SET', META .. ':last', call('HGET', META, 'lease'), 'EX', LAST_SECONDS)
  call('UNLINK', META .. ':replicated', unpack(KEYS, 1, 15))
end
return {OK, cmsgpack.pack({used, record})}
