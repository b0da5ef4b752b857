-- Prepended to every script on a scope. Its used slots are in five sorted sets, one for each state:
-- free (by the time of their release), expiring (leased, by the end of the lease), order and aside
-- (live, by use), resting (quarantined, by the end of the quarantine; infinite for a slot that only
-- a pin holds). For a moment after a clear they are in its detached sets.
-- `aside` has live pages that were not evictable when their turn came, as prefix of another page or
-- because of a pin. A page keeps its position in the order of use, and returns to `order` when it
-- becomes evictable: until then no search for a victim meets it twice.
local META, SLOTS, LIVE, LEASED, LEASES, FREE, EXPIRING, ORDER, ASIDE, RESTING, CHILDREN, PINS, PINNED, HOLDS, DETACHED = unpack(KEYS, 1, 15)
local ONCE = KEYS[16]
local QUARANTINE = tonumber(ARGV[1])
local BUDGET = 256 -- slots of each kind of due work in one call: about half a millisecond
local IS_FREE, IS_LEASED, IS_LIVE, IS_RESTING = 0, 1, 2, 3
-- Indexes in a slot's record. The generation is the number of the lease. The page is its length and
-- checksum, 16 bytes that are only compared.
local STATE, EPOCH, LEASE, UNTIL, PAGE, KEY, PREFIX, OWNER = 1, 2, 3, 4, 5, 6, 7, 8
local NO_PAGE = string.rep('\0', 16)
local OK, UNKNOWN, REUSED, REFUSED = 0, 1, 2, 3

local call = redis.call
local clock = call('TIME')
-- In microseconds: whole numbers far below 2^53, the limit of exact numbers in Lua. ARGV[2] is the
-- offset of tests, and 0 otherwise.
local NOW = clock[1] * 1000000 + clock[2] + ARGV[2]

local function whole(number)
  return string.format('%.0f', number)
end

-- Calls a command with a list of arguments. Redis refuses an empty list, so none is sent.
local function each(command, key, arguments)
  if #arguments == 0 then return {} end
  return call(command, key, unpack(arguments))
end

local function pack_record(record)
  return cmsgpack.pack(unpack(record, 1, 8))
end

local function records_of(slots)
  local records = each('HMGET', SLOTS, slots)
  for i, text in ipairs(records) do
    records[i] = text and {cmsgpack.unpack(text)} or false
  end
  return records
end

-- Returns the answer that is stored under the idempotency key, or nil.
local function kept_answer()
  local digest = ARGV[5]
  if digest == '' then return nil end
  local kept = call('HMGET', ONCE, 'digest', ARGV[6])
  if kept[1] and kept[1] ~= digest then return {REUSED} end
  if kept[2] then return {OK, kept[2]} end
  return nil
end

local function answer(...)
  local text = cmsgpack.pack(...)
  if ARGV[5] ~= '' then
    local is_new = call('EXISTS', ONCE) == 0
    call('HSET', ONCE, 'digest', ARGV[5], ARGV[6], text)
    if is_new then call('PEXPIRE', ONCE, ARGV[7]) end
  end
  return {OK, text}
end

-- Records a use of live pages, from the last slot to the first.
local function use(slots)
  local count = #slots
  if count == 0 then return end
  local last, arguments = call('HINCRBY', META, 'use', count), {}
  for i = count, 1, -1 do
    arguments[#arguments + 1] = last - i + 1
    arguments[#arguments + 1] = slots[i]
  end
  call('ZADD', ORDER, unpack(arguments))
  if call('ZCARD', ASIDE) > 0 then call('ZREM', ASIDE, unpack(slots)) end
end

-- Returns the pinned ones of these slots, as a set.
local function pinned_among(slots)
  local found = {}
  if #slots > 0 and call('EXISTS', HOLDS) == 1 then
    for i, count in ipairs(call('HMGET', HOLDS, unpack(slots))) do
      if count then found[slots[i]] = true end
    end
  end
  return found
end

-- Makes pages evictable again that are no longer a prefix or pinned: those of `slots` that are in
-- `aside`, with their keys.
local function come_back(slots, keys)
  if #slots == 0 or call('ZCARD', ASIDE) == 0 then return end
  local uses, children, pinned = call('ZMSCORE', ASIDE, unpack(slots)), call('HMGET', CHILDREN, unpack(keys)), pinned_among(slots)
  local back, gone = {}, {}
  for i, slot in ipairs(slots) do
    if uses[i] and not children[i] and not pinned[slot] then
      back[#back + 1], back[#back + 2] = uses[i], slot
      gone[#gone + 1] = slot
    end
  end
  each('ZADD', ORDER, back)
  each('ZREM', ASIDE, gone)
end

-- Changes the number of live pages that have each of these keys as their prefix.
local function count_children(changes)
  local keys, writes, gone = {}, {}, {}
  for key in pairs(changes) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, count in ipairs(each('HMGET', CHILDREN, keys)) do
    local now = (tonumber(count) or 0) + changes[keys[i]]
    if now > 0 then
      writes[#writes + 1], writes[#writes + 2] = keys[i], now
    else
      gone[#gone + 1] = keys[i]
    end
  end
  each('HSET', CHILDREN, writes)
  each('HDEL', CHILDREN, gone)
  local slots, tails = {}, {}
  for i, slot in ipairs(each('HMGET', LIVE, gone)) do
    if slot then slots[#slots + 1], tails[#tails + 1] = slot, gone[i] end
  end
  come_back(slots, tails)
end

local function add_to(counts, key, number)
  counts[key] = (counts[key] or 0) + number
end

local function builds_on_another(record)
  return record[PREFIX] ~= '' and record[PREFIX] ~= record[KEY]
end

-- Ends due quarantines: the slots are free, unless a pin holds them.
local function end_rests(most)
  local due = call('ZRANGEBYSCORE', RESTING, '-inf', NOW, 'LIMIT', 0, most)
  if #due == 0 then return 0 end
  local pinned, writes, free, gone, held = pinned_among(due), {}, {}, {}, {}
  for i, record in ipairs(records_of(due)) do
    local slot = due[i]
    if pinned[slot] then
      held[#held + 1], held[#held + 2] = 'inf', slot
    else
      record[STATE] = IS_FREE
      writes[#writes + 1], writes[#writes + 2] = slot, pack_record(record)
      free[#free + 1], free[#free + 2] = NOW, slot
      gone[#gone + 1] = slot
    end
  end
  each('HSET', SLOTS, writes)
  each('ZADD', FREE, free)
  each('ZREM', RESTING, gone)
  each('ZADD', RESTING, held)
  return #due
end

-- Moves live or leased slots to the quarantine.
local function let_go(slots, records)
  if #slots == 0 then return end
  local live, leased, leases, ended, children, writes, resting = {}, {}, {}, {}, {}, {}, {}
  local till = NOW + QUARANTINE
  for i, slot in ipairs(slots) do
    local record = records[i]
    leases[#leases + 1] = whole(record[LEASE])
    if record[STATE] == IS_LEASED then
      leased[#leased + 1], ended[#ended + 1] = record[KEY], slot
    else
      live[#live + 1] = record[KEY]
      if builds_on_another(record) then add_to(children, record[PREFIX], -1) end
    end
    local rest = {IS_RESTING, record[EPOCH], record[LEASE], till, '', '', '', ''}
    writes[#writes + 1], writes[#writes + 2] = slot, pack_record(rest)
    resting[#resting + 1], resting[#resting + 2] = till, slot
  end
  call('HDEL', LEASES, unpack(leases))
  each('HDEL', LEASED, leased)
  each('ZREM', EXPIRING, ended)
  if #live > 0 then
    call('HDEL', LIVE, unpack(live))
    call('ZREM', ORDER, unpack(slots))
    if call('ZCARD', ASIDE) > 0 then call('ZREM', ASIDE, unpack(slots)) end
    count_children(children)
  end
  call('HSET', SLOTS, unpack(writes))
  call('ZADD', RESTING, unpack(resting))
  if QUARANTINE == 0 then end_rests(#slots) end
end

-- Ends due leases.
local function end_leases(most)
  local due = call('ZRANGEBYSCORE', EXPIRING, '-inf', NOW, 'LIMIT', 0, most)
  let_go(due, records_of(due))
  if #due > 0 then call('HINCRBY', META, 'expired', #due) end
  return #due
end

-- Ends due pins, in chunks of up to 256 slots, until about `most` slots are done.
local function end_pins(most)
  local done = 0
  while done < most do
    local name = call('ZRANGEBYSCORE', PINS, '-inf', NOW, 'LIMIT', 0, 1)[1]
    if not name then break end
    local slots, left, gone, free = cmsgpack.unpack(call('HGET', PINNED, name)), {}, {}, {}
    call('ZREM', PINS, name)
    call('HDEL', PINNED, name)
    for i, count in ipairs(call('HMGET', HOLDS, unpack(slots))) do
      if tonumber(count) > 1 then
        left[#left + 1], left[#left + 2] = slots[i], count - 1
      else
        gone[#gone + 1] = slots[i]
      end
    end
    each('HSET', HOLDS, left)
    each('HDEL', HOLDS, gone)
    for i, till in ipairs(each('ZMSCORE', RESTING, gone)) do
      if till == 'inf' then free[#free + 1], free[#free + 2] = 0, gone[i] end
    end
    each('ZADD', RESTING, free)
    local live, keys = {}, {}
    for i, record in ipairs(records_of(gone)) do
      if record[STATE] == IS_LIVE then live[#live + 1], keys[#keys + 1] = gone[i], record[KEY] end
    end
    come_back(live, keys)
    done = done + #slots
  end
  return done
end

-- Quarantines the slots of the detached sets that clears have left.
local function take_apart(most)
  local done = 0
  while done < most do
    local first = call('ZRANGE', DETACHED, 0, 0, 'WITHSCORES')
    if #first == 0 then break end
    local till = tonumber(first[2])
    local popped, slots = call('ZPOPMIN', DETACHED .. ':' .. first[1], most - done), {}
    for i = 1, #popped, 2 do slots[#slots + 1] = popped[i] end
    if #slots < most - done then call('ZREM', DETACHED, first[1]) end
    local writes, resting = {}, {}
    for i, record in ipairs(records_of(slots)) do
      -- The writer does not know of the clear, and may write until its lease would have ended.
      local ends = record[STATE] == IS_LEASED and math.max(till, record[UNTIL]) or till
      local rest = {IS_RESTING, record[EPOCH], record[LEASE], ends, '', '', '', ''}
      writes[#writes + 1], writes[#writes + 2] = slots[i], pack_record(rest)
      resting[#resting + 1], resting[#resting + 2] = ends, slots[i]
    end
    each('HSET', SLOTS, writes)
    each('ZADD', RESTING, resting)
    done = done + math.max(#slots, 1)
  end
  return done
end

-- Runs a bounded part of the due work; returns true if more may be due.
local function settle()
  local apart, leases, pins = take_apart(BUDGET), end_leases(BUDGET), end_pins(BUDGET)
  local rests = end_rests(BUDGET)
  return math.max(apart, leases, pins, rests) >= BUDGET
end

-- Returns true while a new scope gives no slot: its file may still be written under leases from
-- before it was created here.
local function is_closed()
  return tonumber(call('HGET', META, 'closed') or 0) > NOW
end

local function count_resting()
  local count = call('ZCARD', RESTING)
  for _, name in ipairs(call('ZRANGE', DETACHED, 0, -1)) do count = count + call('ZCARD', DETACHED .. ':' .. name) end
  return count
end

local function count_free(slots, fresh)
  return call('ZCARD', FREE) + slots - fresh
end
