-- Hop 3. request: worker, count. Result: epoch, groups = {{draw, environment, task}, ...} of the grants.
-- Grants: see `grants` in ledger.lua; blobs = their transcripts.
local names = {}
local deadline = string.format('%.0f', now + rules.scoring_lease_ms)
local function grant(d, i, sample)
  if sample.sa >= rules.max_attempts then
    fail(d, i, sample, 'scoring attempts')
    return settle(d)
  end
  local name = member(d, i)
  move(sample, 'scoring')
  sample.sa = sample.sa + 1; sample.scorer = request.worker
  touch(d)
  enqueue('scoring', name, deadline)
  list_grant(d, i, sample.sa, group(d))
  names[#names + 1] = name
end
local function in_state(d, i, state)  -- the sample, if it is
  local g = group(d)
  local sample = g and sample_of(g, d, i + 1)
  return sample and sample.st == state and sample or nil
end

local expired, draws = call('ZRANGEBYSCORE', K.scoring, '-inf', due()), {}
for n, name in ipairs(expired) do
  local d, i = split(name)
  draws[n] = d
  want(d, i)
end
preload(draws)
for _, name in ipairs(expired) do
  if granted() < request.count then
    local d, i = split(name)
    local sample = in_state(d, i, 'scoring')
    if sample then
      move(sample, 'unscored')
      add('scoring_expired', 1)
      dequeue('scoring', name)
      touch(d)
      grant(d, i, sample)
    end
  end
end

-- An entry of the stream names up to 64 samples. It stays until none of them waits any more.
local function grant_entry(members)
  local draws = {}
  for position = 1, #members, 12 do
    local d, i = unpacked(MEMBER, members, position)
    draws[#draws + 1] = d
    want(d, i)
  end
  preload(draws)
  for position = 1, #members, 12 do
    if granted() >= request.count then return false end
    local d, i = unpacked(MEMBER, members, position)
    local sample = in_state(d, i, 'unscored')
    if sample then grant(d, i, sample) end
  end
  return true
end
local after, done = '-', {}
while granted() < request.count do
  local entries = call('XRANGE', K.unscored, after, '+', 'COUNT', 16)
  if #entries == 0 then break end
  for _, entry in ipairs(entries) do
    if grant_entry(entry[2][2]) then done[#done + 1] = entry[1] end
    after = '(' .. entry[1]
  end
end
flush(K.unscored, done, 'XDEL')

local blobs = {}
for first = 1, #names, 1000 do
  local raw = call('HMGET', K.transcripts, unpack(names, first, min(first + 999, #names)))
  for _, b in ipairs(raw) do blobs[#blobs + 1] = b or '' end
end
return finish({groups = grants.groups, epoch = meta.epoch}, grant_rows(), blobs)
