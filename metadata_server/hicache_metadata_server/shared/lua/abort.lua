-- Ends leases without a page. Of a lease that is listed twice only the first entry counts.
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local leases, done = cmsgpack.unpack(ARGV[3]), {}
for i, lease in ipairs(leases) do leases[i], done[i] = whole(lease), false end
local slots, place, seen = {}, {}, {}
for i, slot in ipairs(each('HMGET', LEASES, leases)) do
  if slot and not seen[slot] then seen[slot], slots[#slots + 1], place[#place + 1] = true, slot, i end
end
local going, records = {}, {}
for n, record in ipairs(records_of(slots)) do
  if record[STATE] == IS_LEASED and record[UNTIL] > NOW then
    going[#going + 1], records[#records + 1], done[place[n]] = slots[n], record, true
  end
end
let_go(going, records)
return answer(done)
