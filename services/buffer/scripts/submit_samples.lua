-- Hop 2. Of each lease: 1 = scored + 2 = bounded + 4 = its body is in the hash already, unless another one was there before;
-- reward, info, failure. Blobs: of each its body, and score or transcript.
local estimate = get('estimate')
local function checksum(info) return string.sub(info, 1, 4) end
local function full(size, text) return get('bytes') + size + #text > rules.quota_bytes end
local function store(d, i, sample, reward, info, body, text)  -- body: nil when it is there
  local g, name, scored = group(d), member(d, i), reward ~= nil
  dequeue('leases', name)
  add('reserved', -g.r)
  if sample.part ~= '' then
    forget('partials', name)
    hold(g, -partial_size(sample))
    sample.part = ''
  end
  sample.info = info
  local _, _, _, size, transcript, spilled = unpacked(BODY, info)
  if body then put('bodies', name, body) end
  hold(g, size + #text)
  if scored then
    move(sample, 'scored')
    sample.ended = reward
    put('scores', name, text)
  else
    move(sample, 'unscored')
    put('transcripts', name, text)
    announce(d, i)
  end
  estimate = estimate + floor(((spilled > 0 and spilled or size) + transcript - estimate) / 16)
end

local HELD = {unscored = true, scoring = true, scored = true}  -- samples in these have a body
local outcomes, finished, beside, n, position = {}, {}, {}, 0, 1
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  for i = first, first + count - 1 do
    local sample, outcome = find(d, i, epoch), 'accepted'
    local kind, reward, info, failure, after = unpacked('<Bc8I4c0I4c0', ARGV[5], position)
    position = after
    n = n + 1
    local scored, body, text, size = kind % 2 == 1, ARGV[4 + 2 * n], ARGV[5 + 2 * n], select(4, unpacked(BODY, info))
    if kind >= 4 then
      beside[#beside + 1] = {d, i}
      body = nil
    end
    if not sample then
      outcome = absent(d, epoch)
    elseif sample.st == 'closed' then
      outcome = 'outdated'
    elseif attempt > sample.a then
      outcome = 'unknown'
    elseif attempt < sample.a or sample.st == 'partial' then
      outcome = 'fenced'
    elseif sample.st ~= 'leased' then
      outcome = checksum(sample.info) == checksum(info) and 'accepted' or 'conflict'
    elseif failure ~= '' then
      fail(d, i, sample, failure)
      finished[#finished + 1] = d
    elseif kind % 4 >= 2 and full(size, text) then
      outcome = 'spill'
    else
      store(d, i, sample, scored and reward or nil, info, body, text)
      touch(d)
      if scored then finished[#finished + 1] = d end
    end
    outcomes[n] = outcome
  end
end
settle_all(finished)
for _, pair in ipairs(beside) do  -- what came for nothing
  local d, i = unpack(pair)
  local sample = group(d) and sample_of(group(d), d, i + 1)
  if not sample or not HELD[sample.st] then forget('bodies', member(d, i)) end
end
set('estimate', estimate)
return finish(exceptions(outcomes))
