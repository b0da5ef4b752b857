-- Creates the keys of a listed scope, unless they exist; returns its record.
local slots, slot_bytes, geometry, identity, tenant, earlier, is_new, is_lost = unpack(cmsgpack.unpack(ARGV[3]), 1, 8)
local closed = earlier > 0 and whole(NOW + earlier + QUARANTINE) or 0
if call('EXISTS', META) == 0 then
  call(
    'HSET', META, 'slots', slots, 'slot_bytes', slot_bytes, 'geometry', geometry, 'identity', identity, 'tenant', tenant, 'fresh', 0,
    'closed', closed, 'lost', is_lost and 1 or 0, 'lease', call('GET', META .. ':last') or 0, 'epoch', 0, 'use', 0, 'cleared', 0, 'hits', 0, 'misses', 0, 'evicted', 0
  )
elseif is_new and call('HGET', META, 'lost') == '1' then
  -- Another server has read the list between the two scripts of the one that creates the scope, and
  -- taken the keys for lost.
  call('HSET', META, 'closed', closed, 'lost', 0)
end
return {OK, cmsgpack.pack(call('HMGET', META, 'slots', 'slot_bytes', 'geometry', 'identity', 'tenant'))}
