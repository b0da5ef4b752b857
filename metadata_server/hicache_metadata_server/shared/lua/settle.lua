-- What is due where nobody asks for it, and how the scope is.
local meta = call('HMGET', META, 'slots', 'fresh', 'hits', 'misses', 'evicted')
if not meta[1] then return {UNKNOWN} end
local more = settle()
local live, leased = call('ZCARD', ORDER) + call('ZCARD', ASIDE), call('ZCARD', EXPIRING)
local free = count_free(tonumber(meta[1]), tonumber(meta[2]))
return {OK, cmsgpack.pack({more, free, leased, live, count_resting(), tonumber(meta[3]), tonumber(meta[4]), tonumber(meta[5])})}
