-- Enters scopes into the list, all or none. A record has slots, slot_bytes, geometry, identity and
-- tenant. The first four must match those of a listed scope; the tenant too, unless the caller sees
-- all. The new scopes must be within the quota of the tenant: limits of scopes, slots and bytes, or
-- -1.
local OK, REUSED, REFUSED = 0, 2, 3
local SCOPES, ONCE, digest, field = KEYS[1], KEYS[2], ARGV[2], ARGV[3]
if digest ~= '' then
  local kept = redis.call('HMGET', ONCE, 'digest', field)
  if kept[1] and kept[1] ~= digest then return {REUSED} end
  if kept[2] then return {OK, kept[2]} end
end
local names, records, most, tenant, sees_all, quota = unpack(cmsgpack.unpack(ARGV[1]), 1, 6)
local wanted, created, new = {}, {}, {}
for i, name in ipairs(names) do
  local known = redis.call('HGET', SCOPES, name)
  known = known and cmsgpack.unpack(known) or wanted[name]
  created[i] = not known
  if not known then
    wanted[name] = records[i]
    new[#new + 1], new[#new + 2] = name, cmsgpack.pack(records[i])
  else
    if known[5] ~= tenant and not sees_all then return {REFUSED, cmsgpack.pack({i - 1, 4, ''})} end
    for at = 1, 4 do
      if known[at] ~= records[i][at] then return {REFUSED, cmsgpack.pack({i - 1, at - 1, known[at]})} end
    end
  end
end

-- Returns the holdings of the tenant if they would exceed its quota, else nil.
local function held_beyond()
  if quota[1] < 0 and quota[2] < 0 and quota[3] < 0 then return nil end
  local held, more, unsized = {0, 0, 0}, {0, 0, 0}, false
  local function add(sums, record)
    sums[1], sums[2], sums[3] = sums[1] + 1, sums[2] + record[1], sums[3] + record[1] * record[2]
  end
  for _, packed in ipairs(redis.call('HVALS', SCOPES)) do
    local record = cmsgpack.unpack(packed)
    if record[5] == tenant then add(held, record) end
  end
  for _, record in pairs(wanted) do
    add(more, record)
    unsized = unsized or tonumber(record[2]) == 0
  end
  local beyond = quota[3] >= 0 and unsized
  for i = 1, 3 do beyond = beyond or quota[i] >= 0 and held[i] + more[i] > quota[i] end
  return beyond and held or nil
end

if #new > 0 then
  if redis.call('HLEN', SCOPES) + #new / 2 > most then return {REFUSED, cmsgpack.pack({-1, 0, ''})} end
  local held = held_beyond()
  if held then
    local places = {}
    for i in ipairs(names) do
      if created[i] then places[#places + 1] = i - 1 end
    end
    for i, number in ipairs(held) do held[i] = string.format('%.0f', number) end
    return {REFUSED, cmsgpack.pack({places, 5, held})}
  end
  redis.call('HSET', SCOPES, unpack(new))
end
local text = cmsgpack.pack(created)
if digest ~= '' then
  redis.call('HSET', ONCE, 'digest', digest, field, text)
  redis.call('PEXPIRE', ONCE, ARGV[4])
end
return {OK, text}
