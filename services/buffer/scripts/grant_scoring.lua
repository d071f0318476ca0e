-- Hop 3. request: worker, count. Result: {{draw, sample, attempt, environment, index}, ...}; blobs = their transcripts.
local grants, members = {}, {}
local function grant(d, i, sample)
  if sample.sa >= rules.max_attempts then return fail(d, i, sample, 'scoring attempts') end
  local member, g = d .. ':' .. i, group(d)
  move(sample, 'scoring')
  sample.sa = sample.sa + 1; sample.sw = request.worker
  touch(d)
  enqueue('scoring', string.format('%.0f', now + rules.scoring_lease_ms), member)
  grants[#grants + 1] = {d, i, sample.sa, g.e, g.x}
  members[#members + 1] = member
end
local function preload_members(list)
  local draws = {}
  for n, member in ipairs(list) do draws[n] = split(member) end
  preload(draws)
end
local expired = call('ZRANGEBYSCORE', K.scoring, '-inf', string.format('%.0f', due()))
preload_members(expired)
for _, member in ipairs(expired) do
  if #grants < request.count then
    local d, i = split(member)
    local g = group(d)
    local sample = g and g.s[i + 1]
    if sample and sample.st == 'scoring' then
      move(sample, 'unscored')
      add('scoring_expired', 1)
      dequeue('scoring', member)
      touch(d)
      grant(d, i, sample)
    end
  end
end
while #grants < request.count do
  local entries = call('XRANGE', K.unscored, '-', '+', 'COUNT', request.count - #grants)
  if #entries == 0 then break end
  local ids, list = {}, {}
  for n, entry in ipairs(entries) do ids[n] = entry[1]; list[n] = entry[2][2] end
  preload_members(list)
  for _, member in ipairs(list) do
    local d, i = split(member)
    local g = group(d)
    local sample = g and g.s[i + 1]
    if sample and sample.st == 'unscored' then grant(d, i, sample) end
  end
  flush(K.unscored, ids, 'XDEL')
end
local blobs = {}
for first = 1, #members, 1000 do
  local raw = call('HMGET', K.transcripts, unpack(members, first, min(first + 999, #members)))
  for _, b in ipairs(raw) do blobs[#blobs + 1] = b or '' end
end
return finish({grants = grants, epoch = get('epoch')}, blobs)
