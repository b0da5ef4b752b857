-- Confirm of SGLang's protocol: makes slots live that are reserved for their keys, then releases
-- others. Returns for each entry whether it was valid.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local epoch = tonumber(call('HGET', META, 'epoch'))
local keys, slots, releases = unpack(cmsgpack.unpack(ARGV[3]), 1, 3)
local leased, live = each('HMGET', LEASED, keys), each('HMGET', LIVE, keys)
local names, entries, mine, confirmed, released = {}, {}, {}, {}, {}
for i, slot in ipairs(slots) do names[i] = whole(slot) end
local records = records_of(names)
for i, name in ipairs(names) do
  local is_leased = leased[i] == name and records[i][UNTIL] > NOW
  if is_leased and not mine[name] then
    mine[name], entries[#entries + 1] = true, {name, records[i], NO_PAGE}
  end
  confirmed[i] = is_leased or live[i] == name
end
make_live(entries)
for i, slot in ipairs(releases) do releases[i] = whole(slot) end
local going, gone, seen = {}, {}, {}
for i, record in ipairs(records_of(releases)) do
  local is_current = record and record[EPOCH] == epoch
  released[i] = not (is_current and record[STATE] == IS_LIVE)
  if is_current and record[STATE] == IS_LEASED and not seen[releases[i]] then
    seen[releases[i]], going[#going + 1], gone[#gone + 1] = true, releases[i], record
  end
end
let_go(going, gone)
return {OK, cmsgpack.pack({confirmed, released})}
