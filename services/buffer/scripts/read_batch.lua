-- Everything of a numbered batch. request: batch. Result: composition, members {draw, index} of its scored samples, epoch.
-- Blobs: the groups' records (JSON), then the members' bodies, then their scores.
local raw = call('HGET', K.batches, request.batch)
if not raw then return out_of_range(request.batch) end
local composition, draws, members, blobs = cjson.decode(raw), {}, {}, {}
for n, c in ipairs(composition.g) do draws[n] = c[1] end
preload(draws)
for n, d in ipairs(draws) do
  blobs[n] = cjson.encode(groups[d])
  for i, sample in ipairs(groups[d].s) do
    if sample.st == 'scored' then members[#members + 1] = d .. ':' .. (i - 1) end
  end
end
for _, name in ipairs({'bodies', 'scores'}) do
  for first = 1, #members, 1000 do
    for _, b in ipairs(call('HMGET', K[name], unpack(members, first, min(first + 999, #members)))) do blobs[#blobs + 1] = b end
  end
end
return finish({composition = composition, members = #members, epoch = get('epoch')}, blobs)
