-- One operation on pages of a namespace. Redis runs a script as a whole.
-- ARGV: batch (MessagePack), then a payload for each page. Keys of Redis:
--   PREFIX:NAMESPACE       hash: the pages
--   PREFIX:NAMESPACE:uses  sorted set: the same pages by their last use
--   PREFIX:uses            how many uses there were
--   PREFIX:bytes           hash: bytes of each namespace
--   PREFIX:epochs          hash: how often each namespace was cleared
local batch = cmsgpack.unpack(ARGV[1])
local prefix, pages = batch.prefix, batch.prefix .. ':' .. batch.namespace
local epoch = tonumber(redis.call('HGET', prefix .. ':epochs', batch.namespace) or 0)

local function remove(namespace, key)
  local pages = prefix .. ':' .. namespace
  redis.call('HINCRBY', prefix .. ':bytes', namespace, 0 - redis.call('HSTRLEN', pages, key))
  redis.call('ZREM', pages .. ':uses', key)
  return redis.call('HDEL', pages, key)
end

local operations = {
  exists = function(key) return redis.call('HSTRLEN', pages, key) == batch.bytes end,
  read = function(key) return redis.call('HGET', pages, key) end,
  delete = function(key) return remove(batch.namespace, key) end,
  -- No two writes have the same envelope: a page that was stored again meanwhile stays.
  discard = function(key, envelope)
    local page = redis.call('HGET', pages, key) or ''
    local is_same = #page ~= batch.bytes or page:sub(-#envelope) == envelope
    return is_same and remove(batch.namespace, key)
  end,
  -- However late a set comes, the pages that a clear has removed do not come back.
  write = function(key, page)
    if batch.epoch ~= epoch then return false end
    remove(batch.namespace, key)
    redis.call('HSET', pages, key, page)
    redis.call('HINCRBY', prefix .. ':bytes', batch.namespace, #page)
    return redis.call('ZADD', pages .. ':uses', 0, key)
  end,
}

-- The head of a chain comes last, so that its tail is evicted first.
local function use(keys)
  local turn = redis.call('INCRBY', prefix .. ':uses', #keys) - #keys
  for i, key in ipairs(keys) do redis.call('ZADD', pages .. ':uses', 'XX', turn + i, key) end
end

local function evict()
  local oldest = { turn = math.huge }
  for _, namespace in ipairs(redis.call('HKEYS', prefix .. ':bytes')) do
    local first = redis.call('ZRANGE', prefix .. ':' .. namespace .. ':uses', 0, 0, 'WITHSCORES')
    local turn = tonumber(first[2] or math.huge)
    if turn < oldest.turn then oldest = { turn = turn, namespace = namespace, key = first[1] } end
  end
  return remove(oldest.namespace, oldest.key)
end

local function is_full()
  local total = 0
  for _, bytes in ipairs(redis.call('HVALS', prefix .. ':bytes')) do total = total + bytes end
  return batch.capacity > 0 and total > batch.capacity
end

local answers, evicted = {}, 0
for i, key in ipairs(batch.keys) do answers[i] = operations[batch.operation](key, ARGV[1 + i]) end
use(batch.uses)
while is_full() do evicted = evicted + evict() end
return { answers, epoch, evicted }
