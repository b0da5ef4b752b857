-- Returns the content of slots, for copies and backups: {slot, state, lease, time left, key,
-- prefix, use} of each, and its page.
local meta = call('HMGET', META, 'slots', 'fresh', 'epoch', 'cleared', 'lease')
if not meta[1] then return {UNKNOWN} end
settle()
local start, count, most = unpack(cmsgpack.unpack(ARGV[3]), 1, 3)
local fresh, epoch, names = tonumber(meta[2]), tonumber(meta[3]), {}
for slot = start, math.min(start + count, fresh) - 1 do names[#names + 1] = whole(slot) end
local records, pins, rows, pages = records_of(names), each('HMGET', HOLDS, names), {}, {}
local uses, aside = each('ZMSCORE', ORDER, names), each('ZMSCORE', ASIDE, names)
for i, record in ipairs(records) do
  local state, till = record[STATE], record[UNTIL]
  -- A clear has happened that this slot does not show yet.
  if record[EPOCH] < epoch and (state == IS_LEASED or state == IS_LIVE) then
    state, till = IS_RESTING, state == IS_LEASED and math.max(till, tonumber(meta[4])) or tonumber(meta[4])
  end
  local left = state == IS_LEASED and most or state == IS_RESTING and math.max(1, till - NOW) or 0
  if pins[i] and state == IS_RESTING then left = most end
  local is_live = state == IS_LIVE
  pages[i] = is_live and record[PAGE] or NO_PAGE
  rows[i] = {
    tonumber(names[i]), state, record[LEASE], left, is_live and record[KEY] or '', is_live and record[PREFIX] or '',
    tonumber(is_live and (uses[i] or aside[i]) or 0),
  }
end
return {OK, cmsgpack.pack({fresh, epoch, tonumber(meta[5]), rows}), table.concat(pages)}
