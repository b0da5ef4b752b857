-- How many slots of a scope are not free. A scope that has none is removed, if asked for.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local remove = unpack(cmsgpack.unpack(ARGV[3]), 1, 1)
settle()
local used = call('ZCARD', ORDER) + call('ZCARD', ASIDE) + call('ZCARD', EXPIRING) + count_resting()
if used == 0 and remove then call('UNLINK', META .. ':replicated', unpack(KEYS, 1, 15)) end
return {OK, cmsgpack.pack(used)}
