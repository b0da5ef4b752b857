-- Returns the state of slots, then that of the slots of keys: false for a key without one.
local meta = call('HMGET', META, 'slots', 'epoch', 'cleared', 'closed')
if not meta[1] then return {UNKNOWN} end
settle()
local slots, keys = unpack(cmsgpack.unpack(ARGV[3]), 1, 2)
local names, epoch = {}, tonumber(meta[2])
for i, slot in ipairs(slots) do names[i] = whole(slot) end
local live, leased = each('HMGET', LIVE, keys), each('HMGET', LEASED, keys)
for i in ipairs(keys) do names[#slots + i] = live[i] or leased[i] or '' end
local records, pins, rows, pages = records_of(names), each('HMGET', HOLDS, names), {}, {}
for i, record in ipairs(records) do
  rows[i], pages[i] = false, NO_PAGE
  if record then
    -- A clear has happened that this slot does not show yet.
    if record[EPOCH] < epoch and (record[STATE] == IS_LEASED or record[STATE] == IS_LIVE) then
      local till = record[STATE] == IS_LEASED and math.max(record[UNTIL], tonumber(meta[3])) or tonumber(meta[3])
      record[STATE], record[UNTIL], record[KEY], record[PREFIX], record[OWNER] = IS_RESTING, till, '', '', ''
    end
    if record[STATE] == IS_LIVE then pages[i] = record[PAGE] end
    rows[i] = {
      tonumber(names[i]), record[STATE], record[LEASE], math.max(0, record[UNTIL] - NOW), record[KEY], record[PREFIX], record[OWNER],
      tonumber(pins[i] or 0),
    }
  elseif names[i] ~= '' then
    local closed = tonumber(meta[4] or 0)
    rows[i] = {tonumber(names[i]), closed > NOW and IS_RESTING or IS_FREE, 0, math.max(0, closed - NOW), '', '', '', 0}
  end
end
return {OK, cmsgpack.pack(rows), table.concat(pages)}
