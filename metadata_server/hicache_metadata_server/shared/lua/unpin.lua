-- Makes the chunks of a pin due now.
if call('EXISTS', META) == 0 then return {UNKNOWN} end
local due = {}
for _, name in ipairs(cmsgpack.unpack(ARGV[3])) do
  due[#due + 1], due[#due + 2] = 0, name
end
if #due > 0 then call('ZADD', PINS, 'XX', unpack(due)) end
settle()
return {OK, cmsgpack.pack(true)}
