-- Makes all that is live or leased go, in a time that does not depend on how much it is: the sets are set apart as a whole, and taken apart later.
local kept = kept_answer()
if kept then return kept end
if call('EXISTS', META) == 0 then return {UNKNOWN} end
settle()
local pages = call('HLEN', LIVE)
-- First, since it makes room: out of memory, Redis takes this and what follows it.
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
