-- Hop 2. Of each lease: 1 = scored + 2 = bounded, reward, info, failure. Blobs: of each its body, and score or transcript.
local estimate = get('estimate')
local function checksum(info) return string.sub(info, 1, 4) end
local function full(body, text) return get('bytes') + #body + #text > rules.quota_bytes end
local function store(d, i, sample, reward, info, body, text)
  local g, name, scored = group(d), member(d, i), reward ~= nil
  dequeue('leases', name)
  add('reserved', -g.r)
  if sample.part ~= '' then
    forget('partials', name)
    hold(g, -partial_size(sample))
    sample.part = ''
  end
  sample.info = info
  put('bodies', name, body)
  hold(g, #body + #text)
  if scored then
    move(sample, 'scored')
    sample.ended = reward
    put('scores', name, text)
  else
    move(sample, 'unscored')
    put('transcripts', name, text)
    announce(d, i)
  end
  local _, _, _, _, transcript, spilled = unpacked(BODY, info)
  estimate = estimate + floor(((spilled > 0 and spilled or #body) + transcript - estimate) / 16)
end

local outcomes, finished, n, position = {}, {}, 0, 1
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  for i = first, first + count - 1 do
    local sample, outcome = find(d, i, epoch), 'accepted'
    local kind, reward, info, failure, after = unpacked('<Bc8I4c0I4c0', ARGV[5], position)
    position = after
    n = n + 1
    local scored, body, text = kind % 2 == 1, ARGV[4 + 2 * n], ARGV[5 + 2 * n]
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
    elseif kind >= 2 and full(body, text) then
      outcome = 'spill'
    else
      store(d, i, sample, scored and reward or nil, info, body, text)
      touch(d)
      if scored then finished[#finished + 1] = d end
    end
    outcomes[n] = outcome
  end
end
table.sort(finished)
for _, d in ipairs(finished) do settle(d) end  -- once all are taken, so that their order does not matter
set('estimate', estimate)
return finish(exceptions(outcomes))
