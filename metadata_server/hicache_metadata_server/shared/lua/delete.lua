-- Deletes live pages; where generations are given, only pages of these generations.
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local keys, generations = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local slots, place, done = {}, {}, {}
for i, slot in ipairs(each('HMGET', LIVE, keys)) do
  done[i] = false
  if slot then slots[#slots + 1], place[#place + 1] = slot, i end
end
local going, records, seen = {}, {}, {}
for n, record in ipairs(records_of(slots)) do
  local meant = generations[place[n]]
  if not seen[slots[n]] and (meant == nil or meant == record[LEASE]) then
    seen[slots[n]], done[place[n]] = true, true
    going[#going + 1], records[#records + 1] = slots[n], record
  end
end
let_go(going, records)
return answer(done)
