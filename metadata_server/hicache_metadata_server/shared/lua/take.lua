-- Writes slots of a snapshot into a scope that nobody uses yet. Each gets a new lease number,
-- greater than any that the source can have given.
local meta = call('HMGET', META, 'slots', 'fresh', 'lease', 'use')
if not meta[1] then return {UNKNOWN} end
local slots, tills, keys, prefixes, uses = unpack(cmsgpack.unpack(ARGV[3]), 1, 5)
local fresh, first, last_use = tonumber(meta[2]), math.max(tonumber(meta[3]) + 1, NOW), tonumber(meta[4])
local records, live, leases, order, free, resting, children = {}, {}, {}, {}, {}, {}, {}
for i, slot in ipairs(slots) do
  local name, lease, key, till, page = whole(slot), first + i - 1, keys[i], tills[i], NO_PAGE
  local state = key ~= '' and IS_LIVE or till > NOW and IS_RESTING or IS_FREE
  if state == IS_LIVE then
    page = string.sub(ARGV[4], 16 * i - 15, 16 * i)
    live[#live + 1], live[#live + 2] = key, name
    leases[#leases + 1], leases[#leases + 2] = whole(lease), name
    order[#order + 1], order[#order + 2] = uses[i], name
    last_use = math.max(last_use, uses[i])
    if prefixes[i] ~= '' and prefixes[i] ~= key then add_to(children, prefixes[i], 1) end
  elseif state == IS_RESTING then
    resting[#resting + 1], resting[#resting + 2] = till, name
  else
    free[#free + 1], free[#free + 2] = NOW, name
  end
  local ends = state == IS_RESTING and till or 0
  records[#records + 1], records[#records + 2] = name, cmsgpack.pack(state, 0, lease, ends, page, key, prefixes[i], '')
  fresh = math.max(fresh, slot + 1)
end
call('HSET', META, 'fresh', whole(fresh), 'lease', whole(first + #slots - 1), 'use', whole(last_use))
each('HSET', SLOTS, records)
each('HSET', LIVE, live)
each('HSET', LEASES, leases)
each('ZADD', ORDER, order)
each('ZADD', FREE, free)
each('ZADD', RESTING, resting)
if next(children) then count_children(children) end
return {OK, cmsgpack.pack(true)}
