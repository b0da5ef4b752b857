-- Prepended to the scripts that make pages live: entries are {slot, record, page}, each slot once.
local function make_live(entries)
  if #entries == 0 then return end
  local slots, writes, keys, by_key, children = {}, {}, {}, {}, {}
  for i, entry in ipairs(entries) do
    local slot, record = entry[1], entry[2]
    record[STATE], record[UNTIL], record[PAGE], record[OWNER] = IS_LIVE, 0, entry[3], ''
    slots[i], keys[i] = slot, record[KEY]
    writes[#writes + 1], writes[#writes + 2] = slot, pack_record(record)
    by_key[#by_key + 1], by_key[#by_key + 2] = record[KEY], slot
    if builds_on_another(record) then add_to(children, record[PREFIX], 1) end
  end
  call('HSET', SLOTS, unpack(writes))
  call('HDEL', LEASED, unpack(keys))
  call('HSET', LIVE, unpack(by_key))
  call('ZREM', EXPIRING, unpack(slots))
  use(slots)
  if next(children) then count_children(children) end
end
