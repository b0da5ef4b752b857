-- Runs due work of a scope without requests; returns its status.
local meta = call('HMGET', META, 'slots', 'fresh', 'hits', 'misses', 'evicted', 'model')
if not meta[1] then return {UNKNOWN} end
local more = settle()
local expired = tonumber(call('HGET', META, 'expired')) or 0
local live, leased = call('ZCARD', ORDER) + call('ZCARD', ASIDE), call('ZCARD', EXPIRING)
local free, resting = count_free(tonumber(meta[1]), tonumber(meta[2])), count_resting()
if is_closed() then free, resting = 0, resting + free end
local hits, misses, evicted, model = tonumber(meta[3]), tonumber(meta[4]), tonumber(meta[5]), meta[6] or ''
return {OK, cmsgpack.pack({more, free, leased, live, resting, hits, misses, evicted, expired, model})}
