-- Empties a scope in constant time: the sets are renamed as a whole, and their slots are visited
-- later (take_apart).
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local pages = call('HLEN', LIVE)
-- Frees memory first: when Redis is out of memory it permits this command, and those behind it.
call('UNLINK', LIVE, LEASED, LEASES, CHILDREN)
local epoch, till = call('HINCRBY', META, 'epoch', 1), NOW + QUARANTINE
call('HSET', META, 'cleared', whole(till))
for number, set in ipairs({ORDER, ASIDE, EXPIRING}) do
  if call('EXISTS', set) == 1 then
    local name = epoch .. '.' .. number
    call('RENAME', set, DETACHED .. ':' .. name)
    call('ZADD', DETACHED, till, name)
  end
end
take_apart(BUDGET)
if QUARANTINE == 0 then end_rests(BUDGET) end
return answer(pages)
