-- Returns the slots of live pages, -1 for other keys; records hits and uses if asked to.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local keys, touch, counted = unpack(cmsgpack.unpack(ARGV[3]), 1, 3)
local found, live, slots = each('HMGET', LIVE, keys), {}, {}
for i, slot in ipairs(found) do
  if slot then live[#live + 1] = slot end
  slots[i] = tonumber(slot or -1)
end
if counted then
  call('HINCRBY', META, 'hits', #live)
  call('HINCRBY', META, 'misses', #keys - #live)
end
if touch then use(live) end
return {OK, cmsgpack.pack(slots)}
