-- Leases slots for keys that are neither live nor leased, and evicts pages if there are too few.
local LOOK = 1024 -- pages that one call examines for eviction beyond those that it needs

local kept = kept_answer()
if kept then return kept end
local meta = call('HMGET', META, 'slots', 'fresh', 'lease', 'epoch')
if not meta[1] then return {UNKNOWN} end
local keys, prefixes, owner, lasts, draining = unpack(cmsgpack.unpack(ARGV[3]), 1, 5)
if draining then return {REFUSED} end
-- A write without effect, which Redis refuses when it is out of memory. Without it a script that
-- has removed something first would be permitted to write beyond the limit.
call('HINCRBY', META, 'use', 0)
settle()
local slots, fresh, epoch = tonumber(meta[1]), tonumber(meta[2]), tonumber(meta[4])

-- Returns the prefixes whose pages are in `aside`: nearly always none.
local function aside_among(prefixes)
  local found = {}
  if #prefixes == 0 or call('ZCARD', ASIDE) == 0 then return found end
  local live, keys = {}, {}
  for i, slot in ipairs(call('HMGET', LIVE, unpack(prefixes))) do
    if slot then live[#live + 1], keys[#keys + 1] = slot, prefixes[i] end
  end
  for i, use in ipairs(each('ZMSCORE', ASIDE, live)) do
    if use then found[keys[i]] = true end
  end
  return found
end

local function counts_of(names)
  local counts = {}
  for i, count in ipairs(each('HMGET', CHILDREN, names)) do counts[names[i]] = tonumber(count) or 0 end
  return counts
end

-- Evicts pages that are no prefix of a live one; moves the others to `aside`. Returns the numbers
-- of evicted and of examined pages. It stops early when the prefix of an evicted page becomes
-- evictable, since that page is older than the remaining candidates.
local function evict_among(candidates)
  local names, keys_of, before = {}, {}, {}
  for i = 1, #candidates, 2 do names[#names + 1] = candidates[i] end
  local records, pinned = records_of(names), pinned_among(names)
  for i, record in ipairs(records) do
    keys_of[i] = record[KEY]
    if builds_on_another(record) then before[#before + 1] = record[PREFIX] end
  end
  local is_aside, children = aside_among(before), counts_of(before)
  for key, count in pairs(counts_of(keys_of)) do children[key] = count end
  local victims, gone, aside, away, seen = {}, {}, {}, {}, 0
  for i, record in ipairs(records) do
    seen = i
    if children[record[KEY]] > 0 or pinned[names[i]] then
      aside[#aside + 1], aside[#aside + 2] = candidates[2 * i], names[i]
      away[#away + 1], is_aside[record[KEY]] = names[i], true
    else
      victims[#victims + 1], gone[#gone + 1] = names[i], record
      if builds_on_another(record) then
        add_to(children, record[PREFIX], -1)
        if is_aside[record[PREFIX]] and children[record[PREFIX]] <= 0 then break end
      end
    end
  end
  each('ZADD', ASIDE, aside)
  each('ZREM', ORDER, away)
  let_go(victims, gone)
  return #victims, seen
end

local function evict(wanted)
  local gone, looked, step = 0, 0, wanted
  while gone < wanted and looked < wanted + LOOK do
    local candidates = call('ZRANGE', ORDER, 0, math.min(step, wanted - gone) - 1, 'WITHSCORES')
    if #candidates == 0 then break end
    local went, seen = evict_among(candidates)
    gone, looked = gone + went, looked + seen
    step = seen < #candidates / 2 and math.max(4, 2 * seen) or wanted
  end
  if gone > 0 then call('HINCRBY', META, 'evicted', gone) end
  return gone
end

-- Evicts ahead of demand: in a full scope one slot in 32 is kept free or quarantined. A page that
-- is evicted only on demand leaves a slot that is usable one quarantine too late.
local function make_room(new)
  local at_hand = count_free(slots, fresh) + count_resting()
  local wanted = new - at_hand
  if slots >= 1024 then wanted = math.max(wanted, math.min(new, math.floor(slots / 32) + new - at_hand)) end
  if wanted <= 0 then return 0 end
  return evict(wanted)
end

-- Takes released slots first, then unused ones; in ascending order, since neighbouring slots are
-- read and written with one request.
local function take(count)
  local taken, popped = {}, call('ZPOPMIN', FREE, count)
  for i = 1, #popped, 2 do taken[#taken + 1] = tonumber(popped[i]) end
  table.sort(taken)
  if #taken < count then
    local more = count - #taken
    for slot = fresh, fresh + more - 1 do taken[#taken + 1] = slot end
    call('HSET', META, 'fresh', whole(fresh + more))
  end
  return taken
end

local answers = {{}, {}, {}, {}, 0}
local states, given, generations, leases = unpack(answers, 1, 4)

local function lease(places)
  if #places == 0 then return end
  local taken, ends = take(#places), NOW + lasts
  local first = math.max(tonumber(meta[3]) + 1, NOW)
  local records, by_key, by_lease, timers = {}, {}, {}, {}
  for n, i in ipairs(places) do
    local slot, number = whole(taken[n]), first + n - 1
    states[i], given[i], generations[i], leases[i] = 0, taken[n], number, number
    records[#records + 1], records[#records + 2] = slot, cmsgpack.pack(IS_LEASED, epoch, number, ends, '', keys[i], prefixes[i] or '', owner)
    by_key[#by_key + 1], by_key[#by_key + 2] = keys[i], slot
    by_lease[#by_lease + 1], by_lease[#by_lease + 2] = whole(number), slot
    timers[#timers + 1], timers[#timers + 2] = ends, slot
  end
  call('HSET', META, 'lease', whole(first + #places - 1))
  call('HSET', SLOTS, unpack(records))
  call('HSET', LEASED, unpack(by_key))
  call('HSET', LEASES, unpack(by_lease))
  call('ZADD', EXPIRING, unpack(timers))
end

-- Live keys first: to report a page as existing is a use of it.
local live, busy, places, seen, used = each('HMGET', LIVE, keys), each('HMGET', LEASED, keys), {}, {}, {}
for i, key in ipairs(keys) do
  if live[i] then
    used[#used + 1] = live[i]
  elseif not busy[i] and not seen[key] then
    seen[key], places[#places + 1] = true, i
  end
end
use(used)
local closed = is_closed()
answers[5] = #places > 0 and not closed and make_room(#places) or 0
-- This batch may have evicted one of its own live pages.
if answers[5] > 0 and #used > 0 then live = call('HMGET', LIVE, unpack(keys)) end
local room = closed and 0 or count_free(slots, fresh)
while #places > room do places[#places] = nil end
lease(places)

-- 0 leased, 1 exists, 2 busy, 3 full
local there, where = {}, {}
local leased_now = {}
for _, i in ipairs(places) do leased_now[keys[i]] = true end
for i, key in ipairs(keys) do
  if not states[i] then
    states[i], given[i], generations[i], leases[i] = (busy[i] or leased_now[key]) and 2 or 3, -1, 0, 0
    if live[i] then
      states[i], given[i] = 1, tonumber(live[i])
      there[#there + 1], where[#where + 1] = live[i], i
    end
  end
end
for n, record in ipairs(records_of(there)) do generations[where[n]] = record[LEASE] end
return answer(answers)
