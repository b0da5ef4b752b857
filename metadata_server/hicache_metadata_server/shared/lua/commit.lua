-- Makes leased slots live. Repeated for a page that is live already it succeeds, if the page is the
-- same.
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local leases, pages = cmsgpack.unpack(ARGV[3]), ARGV[4]
for i, lease in ipairs(leases) do leases[i] = whole(lease) end
local found, slots, place = each('HMGET', LEASES, leases), {}, {}
for i, slot in ipairs(found) do
  if slot then slots[#slots + 1], place[i] = slot, #slots + 1 end
end
local records, done, live, first = records_of(slots), {}, {}, {}
for i in ipairs(leases) do
  local record, page = place[i] and records[place[i]], string.sub(pages, 16 * i - 15, 16 * i)
  if record and record[STATE] == IS_LEASED and record[UNTIL] > NOW and not first[found[i]] then
    first[found[i]] = {page, i}
    live[#live + 1] = {found[i], record, page}
    done[i] = true
  elseif first[found[i]] then
    done[i] = first[found[i]][1] == page
  else
    done[i] = (record and record[STATE] == IS_LIVE and record[PAGE] == page) or false
  end
end
make_live(live)
return answer(done)
