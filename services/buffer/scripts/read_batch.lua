-- Groups of a numbered batch, `most` from `first` on: all at once would hold up everybody else. request: batch, first, most.
-- Result: drops, sequence, epoch, numbered_ms, next_draw, live, of = groups in the batch,
-- groups = {{draw, environment, task, samples, lag, mask below, no signal, members}, ...}. Rows, one a member: sample, info.
-- Blobs: the members' scores. Their bodies are read beside this, in portions, for the same reason.
local raw = call('HGET', K.batches, request.batch)
if not raw then return out_of_range(request.batch) end
local composition, draws, listed, rows, names, blobs = cjson.decode(raw), {}, {}, {}, {}, {}
local last = min(#composition.g, request.first + request.most)
for n = request.first + 1, last do draws[n - request.first] = composition.g[n][1] end
preload(draws)
for n = request.first + 1, last do
  local c = composition.g[n]
  local d, before = c[1], #names
  local g = groups[d]
  for i, sample in ipairs(samples(g)) do
    if sample.st == 'scored' then
      names[#names + 1] = member(d, i - 1)
      rows[#names] = pack('<I4I4c0', i - 1, #sample.info, sample.info)
    end
  end
  listed[n - request.first] = {d, g.e, g.x, g.n, c[2], c[3], c[4], #names - before}
end
for first = 1, #names, 1000 do
  for _, b in ipairs(call('HMGET', K.scores, unpack(names, first, min(first + 999, #names)))) do blobs[#blobs + 1] = b end
end
local result = {groups = listed, of = #composition.g, drops = composition.d, sequence = composition.q, epoch = meta.epoch,
  numbered_ms = composition.t, next_draw = composition.n, live = composition.u}
return finish(result, table.concat(rows), blobs)
