-- Returns slot, generation, length and checksum of pages; records hits, uses and a pin if asked to.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local keys, touch, pin, pin_until = unpack(cmsgpack.unpack(ARGV[3]), 1, 4)
local found, live = each('HMGET', LIVE, keys), {}
for _, slot in ipairs(found) do
  if slot then live[#live + 1] = slot end
end
local records, slots, generations, pages, at = records_of(live), {}, {}, {}, 0
for i, slot in ipairs(found) do
  slots[i], generations[i], pages[i] = -1, 0, NO_PAGE
  if slot then
    at = at + 1
    slots[i], generations[i], pages[i] = tonumber(slot), records[at][LEASE], records[at][PAGE]
  end
end
local counted = redis.pcall('HINCRBY', META, 'hits', #live)
local refused = type(counted) == 'table' and counted.err
-- Without memory or disk Redis takes no writes. Pages are found all the same, but hits and uses are
-- not recorded. A pin needs a write, so that a lookup with one fails; so does any lookup on a
-- replica (READONLY), which may be behind.
local full = refused and (refused:find('OOM', 1, true) or refused:find('MISCONF', 1, true))
if refused and (pin ~= '' or not full) then return counted end
if not refused then
  call('HINCRBY', META, 'misses', #keys - #live)
  if touch then use(live) end
end
if pin ~= '' and #live > 0 then
  -- A pin holds a slot once, also if its key was asked for twice.
  local names, seen, holds = {}, {}, {}
  for _, slot in ipairs(live) do
    if not seen[slot] then seen[slot], names[#names + 1] = true, slot end
  end
  for i, count in ipairs(call('HMGET', HOLDS, unpack(names))) do
    holds[#holds + 1], holds[#holds + 2] = names[i], (tonumber(count) or 0) + 1
  end
  call('HSET', HOLDS, unpack(holds))
  call('HSET', PINNED, pin, cmsgpack.pack(names))
  call('ZADD', PINS, NOW + pin_until, pin)
end
return {OK, cmsgpack.pack({slots, generations}), table.concat(pages)}
