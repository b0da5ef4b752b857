-- Checks slots against every set and index. Returns messages, and the prefixes of live pages.
local meta = call('HMGET', META, 'fresh', 'epoch', 'slot_bytes')
if not meta[1] then return {UNKNOWN} end
local start, count = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local NAMES = {[0] = 'free', 'leased', 'live', 'quarantined'}
local slots, epoch = {}, tonumber(meta[2])
for slot = start, math.min(start + count, tonumber(meta[1])) - 1 do slots[#slots + 1] = whole(slot) end

local places, detached = {}, {}
for name, set in pairs({free = FREE, leased = EXPIRING, live = ORDER, aside = ASIDE, quarantined = RESTING}) do
  places[name] = each('ZMSCORE', set, slots)
end
for _, name in ipairs(call('ZRANGE', DETACHED, 0, -1)) do detached[#detached + 1] = each('ZMSCORE', DETACHED .. ':' .. name, slots) end

local records, keys, leases = records_of(slots), {}, {}
for i, record in ipairs(records) do
  keys[i], leases[i] = record and record[KEY] or '', record and whole(record[LEASE]) or ''
end
local live, leased, by_lease = each('HMGET', LIVE, keys), each('HMGET', LEASED, keys), each('HMGET', LEASES, leases)
local children, holds = each('HMGET', CHILDREN, keys), each('HMGET', HOLDS, slots)
local problems, prefixes = {}, {}

local function say(...)
  problems[#problems + 1] = table.concat({...})
end

local function see_place(i, slot, state)
  local found = {}
  for _, name in ipairs({'free', 'leased', 'live', 'aside', 'quarantined'}) do
    if places[name][i] then found[#found + 1] = name end
  end
  for _, set in ipairs(detached) do
    if set[i] then found[#found + 1] = 'cleared' end
  end
  local place = found[1]
  if #found ~= 1 then
    say('slot ', slot, ' is ', NAMES[state], ', and in ', #found == 0 and 'no list' or 'the lists ' .. table.concat(found, ', '))
  elseif place ~= NAMES[state] and not (place == 'aside' and state == IS_LIVE) and not (place == 'cleared' and state == IS_RESTING) then
    say('slot ', slot, ' is ', NAMES[state], ', and in the list of ', place, ' slots')
  elseif place == 'aside' and not children[i] and not holds[i] then
    say('slot ', slot, ' is kept from eviction, and nothing holds it')
  elseif place == 'quarantined' and places.quarantined[i] == 'inf' and not holds[i] then
    say('slot ', slot, ' is quarantined for good, and no pin holds it')
  elseif place == 'leased' and tonumber(places.leased[i]) ~= records[i][UNTIL] then
    say('slot ', slot, ' is leased until ', whole(records[i][UNTIL]), ', and listed until ', places.leased[i])
  end
end

local function see_index(i, slot, record)
  local state, key, index = record[STATE], record[KEY], record[STATE] == IS_LIVE and live or leased
  if key == '' then say('slot ', slot, ' is ', NAMES[state], ' without a key') end
  if index[i] ~= slot then say('slot ', slot, ' is ', NAMES[state], ' for ', key, ', which is in ', index[i] or 'none') end
  if live[i] and leased[i] then say('key ', key, ' is live and leased') end
  if by_lease[i] ~= slot then say('slot ', slot, ' is ', NAMES[state], ' by lease ', leases[i], ', which is for ', by_lease[i] or 'none') end
end

for i, slot in ipairs(slots) do
  local record = records[i]
  if not record then
    say('slot ', slot, ' has no record')
  elseif not NAMES[record[STATE]] then
    say('slot ', slot, ' is in no state that there is: ', tostring(record[STATE]))
  else
    local held = record[STATE] == IS_LEASED or record[STATE] == IS_LIVE
    if held and record[EPOCH] == epoch then
      see_index(i, slot, record)
      see_place(i, slot, record[STATE])
      if record[STATE] == IS_LIVE then
        if #record[PAGE] ~= 16 then say('slot ', slot, ' is live without a length and a checksum') end
        if builds_on_another(record) then prefixes[#prefixes + 1] = record[PREFIX] end
      end
    else
      -- A clear has happened that this slot does not show yet.
      see_place(i, slot, held and IS_RESTING or record[STATE])
    end
  end
end
return {OK, cmsgpack.pack({#slots, problems, prefixes}), ''}
