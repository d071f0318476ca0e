-- Hop 7. request: number, reader, ms
local record = versions()[request.number]
if not record or record.pub == 0 or record.del == 1 then return refuse('no_version', {number = request.number}) end
call('ZADD', K.holds, string.format('%.0f', now + request.ms), string.format('%.0f:', request.number) .. request.reader)
return finish(true)
