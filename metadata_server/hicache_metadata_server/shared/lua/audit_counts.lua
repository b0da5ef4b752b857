-- Compares the sizes of the sets. A surplus entry of a set belongs to no slot, so that a pass over
-- the slots does not find it.
local meta = call('HMGET', META, 'slots', 'fresh')
if not meta[1] then return {UNKNOWN} end
local slots, fresh = tonumber(meta[1]), tonumber(meta[2])
local problems, live = {}, call('ZCARD', ORDER) + call('ZCARD', ASIDE)
local free, leased, resting = call('ZCARD', FREE), call('ZCARD', EXPIRING), count_resting()

local function see(number, other, ...)
  if number ~= other then problems[#problems + 1] = table.concat({...}) end
end

local listed = free + leased + live + resting
see(listed, fresh, fresh, ' slots were used, and ', listed, ' are in the lists of them')
see(call('HLEN', SLOTS), fresh, fresh, ' slots were used, and ', call('HLEN', SLOTS), ' have a record')
see(fresh <= slots, true, 'there are ', fresh, ' slots in a scope of ', slots)
see(call('HLEN', LIVE), live, live, ' slots are live, and ', call('HLEN', LIVE), ' keys are')
see(call('HLEN', LEASED), leased, leased, ' slots are leased, and ', call('HLEN', LEASED), ' keys are')
see(call('HLEN', LEASES), live + leased, live + leased, ' slots are live or leased, and ', call('HLEN', LEASES), ' leases are known')
see(call('HLEN', PINNED), call('ZCARD', PINS), call('ZCARD', PINS), ' pieces of pins have an end, and ', call('HLEN', PINNED), ' have slots')

-- All pins in one call: they are few, since each lasts for seconds.
local counted = {}
for _, text in ipairs(call('HVALS', PINNED)) do
  for _, slot in ipairs(cmsgpack.unpack(text)) do add_to(counted, slot, 1) end
end
local held = call('HGETALL', HOLDS)
for i = 1, #held, 2 do
  local count = counted[held[i]] or 0
  see(tonumber(held[i + 1]), count, 'slot ', held[i], ' has ', held[i + 1], ' pins, and ', count, ' are known')
  counted[held[i]] = nil
end
for slot, count in pairs(counted) do problems[#problems + 1] = 'slot ' .. slot .. ' has 0 pins, and ' .. count .. ' are known' end
table.sort(problems)
return {OK, cmsgpack.pack({fresh, problems})}
