-- Hop 5. request: incarnation, step
local fenced = fence(request.incarnation)
if fenced then return fenced end
add('version', 1)
save_version(get('version'), {step = request.step, inc = request.incarnation, key = '', crc = 0, pub = 0, del = 0})
return finish(get('version'))
