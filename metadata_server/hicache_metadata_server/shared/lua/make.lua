-- Creates the keys of a listed scope, unless they exist; returns its record.
local slots, slot_bytes, geometry, identity, tenant, earlier = unpack(cmsgpack.unpack(ARGV[3]), 1, 6)
if call('EXISTS', META) == 0 then
  call(
    'HSET', META, 'slots', slots, 'slot_bytes', slot_bytes, 'geometry', geometry, 'identity', identity, 'tenant', tenant, 'fresh', 0,
    'closed', earlier > 0 and whole(NOW + earlier + QUARANTINE) or 0, 'lease', call('GET', META .. ':last') or 0, 'epoch', 0, 'use', 0, 'cleared', 0, 'hits', 0, 'misses', 0, 'evicted', 0
  )
end
return {OK, cmsgpack.pack(call('HMGET', META, 'slots', 'slot_bytes', 'geometry', 'identity', 'tenant'))}
