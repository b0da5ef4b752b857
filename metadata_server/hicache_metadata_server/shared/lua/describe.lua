-- Records the model whose pages a scope holds.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
call('HSET', META, 'model', unpack(cmsgpack.unpack(ARGV[3]), 1, 1))
return {OK, cmsgpack.pack(true)}
