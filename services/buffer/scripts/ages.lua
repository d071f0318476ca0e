-- How old the tokens of open groups are, for number_batch. request: draws. Rows: those of AGE, of each that there is.
local rows = {}
for n, record in ipairs(call('HMGET', K.groups, unpack(request.draws))) do
  if record then rows[#rows + 1] = pack(AGE, request.draws[n], digest(record), age(unpack_group(record))) end
end
return reply(true, table.concat(rows))
