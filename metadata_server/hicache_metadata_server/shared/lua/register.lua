-- Enters scopes into the list of them, all or none. A record has slots, slot_bytes, geometry, identity and tenant; the first four must agree.
local OK, REUSED, REFUSED = 0, 2, 3
local SCOPES, ONCE, digest, field = KEYS[1], KEYS[2], ARGV[2], ARGV[3]
if digest ~= '' then
  local kept = redis.call('HMGET', ONCE, 'digest', field)
  if kept[1] and kept[1] ~= digest then return {REUSED} end
  if kept[2] then return {OK, kept[2]} end
end
local names, records, most = unpack(cmsgpack.unpack(ARGV[1]), 1, 3)
local wanted, created, new = {}, {}, {}
for i, name in ipairs(names) do
  local known = redis.call('HGET', SCOPES, name)
  known = known and cmsgpack.unpack(known) or wanted[name]
  created[i] = not known
  if not known then
    wanted[name] = records[i]
    new[#new + 1], new[#new + 2] = name, cmsgpack.pack(records[i])
  else
    for at = 1, 4 do
      if known[at] ~= records[i][at] then return {REFUSED, cmsgpack.pack({i - 1, at - 1, known[at]})} end
    end
  end
end
if #new > 0 then
  if redis.call('HLEN', SCOPES) + #new / 2 > most then return {REFUSED, cmsgpack.pack({-1, 0, ''})} end
  redis.call('HSET', SCOPES, unpack(new))
end
local text = cmsgpack.pack(created)
if digest ~= '' then
  redis.call('HSET', ONCE, 'digest', digest, field, text)
  redis.call('PEXPIRE', ONCE, ARGV[4])
end
return {OK, text}
