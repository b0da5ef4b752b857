-- Checks entries of one index, from a cursor on: each has to lead to a slot with the state of that
-- index.
local meta = call('HMGET', META, 'epoch')
if not meta[1] then return {UNKNOWN} end
local name, cursor = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local index = ({live = LIVE, leased = LEASED, leases = LEASES, children = CHILDREN})[name]
local set = ({free = FREE, expiring = EXPIRING, order = ORDER, aside = ASIDE, resting = RESTING})[name]
local found = call(index and 'HSCAN' or 'ZSCAN', index or set, cursor, 'COUNT', 256)
local entries, slots, problems = found[2], {}, {}
if name == 'children' then return {OK, cmsgpack.pack({found[1], entries})} end
for i = 1, #entries, 2 do slots[#slots + 1] = index and entries[i + 1] or entries[i] end
local states = {live = IS_LIVE, leased = IS_LEASED, free = IS_FREE, expiring = IS_LEASED, order = IS_LIVE, aside = IS_LIVE, resting = IS_RESTING}
for i, record in ipairs(records_of(slots)) do
  local entry = entries[2 * i - 1]
  if not record then
    problems[#problems + 1] = entry .. ' in the list of ' .. name .. ' leads to slot ' .. slots[i] .. ', which was never used'
  elseif states[name] and record[STATE] ~= states[name] then
    problems[#problems + 1] = entry .. ' in the list of ' .. name .. ' leads to slot ' .. slots[i] .. ', which is in another state'
  elseif (name == 'live' or name == 'leased') and record[KEY] ~= entry then
    problems[#problems + 1] = 'key ' .. entry .. ' is said to be ' .. name .. ' in slot ' .. slots[i] .. ', which has ' .. record[KEY]
  elseif name == 'leases' and whole(record[LEASE]) ~= entry then
    problems[#problems + 1] = 'lease ' .. entry .. ' is said to be for slot ' .. slots[i] .. ', which has ' .. whole(record[LEASE])
  end
end
return {OK, cmsgpack.pack({found[1], problems})}
