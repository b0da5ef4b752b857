-- Renews leases from now on.
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local leases, lasts = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local done, ends = {}, NOW + lasts
for i, lease in ipairs(leases) do leases[i], done[i] = whole(lease), false end
local slots, place = {}, {}
for i, slot in ipairs(each('HMGET', LEASES, leases)) do
  if slot then slots[#slots + 1], place[#place + 1] = slot, i end
end
local writes, timers = {}, {}
for n, record in ipairs(records_of(slots)) do
  if record[STATE] == IS_LEASED and record[UNTIL] > NOW then
    record[UNTIL], done[place[n]] = ends, true
    writes[#writes + 1], writes[#writes + 2] = slots[n], pack_record(record)
    timers[#timers + 1], timers[#timers + 2] = ends, slots[n]
  end
end
each('HSET', SLOTS, writes)
each('ZADD', EXPIRING, timers)
return answer(done)
