-- Writes imported pages into unused slots: the keys of neighbouring slots ('' for a free one) and
-- their order of use.
local meta = call('HMGET', META, 'slots', 'fresh', 'lease', 'use')
local keys, uses = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local start, first = tonumber(meta[2]), math.max(tonumber(meta[3]) + 1, NOW)
local records, live, leases, order, free = {}, {}, {}, {}, {}
for i, key in ipairs(keys) do
  local slot, lease = whole(start + i - 1), first + i - 1
  local state = key == '' and IS_FREE or IS_LIVE
  records[#records + 1], records[#records + 2] = slot, cmsgpack.pack(state, 0, lease, 0, NO_PAGE, key, '', '')
  if key == '' then
    free[#free + 1], free[#free + 2] = NOW, slot
  else
    live[#live + 1], live[#live + 2] = key, slot
    leases[#leases + 1], leases[#leases + 2] = whole(lease), slot
    order[#order + 1], order[#order + 2] = uses[i], slot
  end
end
call('HSET', META, 'fresh', whole(start + #keys), 'lease', whole(first + #keys - 1), 'use', math.max(tonumber(meta[4]), unpack(uses)))
each('HSET', SLOTS, records)
each('HSET', LIVE, live)
each('HSET', LEASES, leases)
each('ZADD', ORDER, order)
each('ZADD', FREE, free)
return {OK, cmsgpack.pack(true)}
