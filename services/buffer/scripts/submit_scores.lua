-- Hop 3. Of each lease: reward. Blobs: the scores
local outcomes, finished, n = {}, {}, 0
local function store(d, i, sample, reward, score)
  local name = member(d, i)
  local _, _, _, _, transcript = unpacked(BODY, sample.info)
  dequeue('scoring', name)
  forget('transcripts', name)
  put('scores', name, score)
  hold(group(d), #score - transcript)
  move(sample, 'scored')
  sample.ended = reward
end
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  for i = first, first + count - 1 do
    local sample, outcome = find(d, i, epoch), 'accepted'
    n = n + 1
    if not sample then
      outcome = absent(d, epoch)
    elseif sample.st == 'closed' then
      outcome = 'outdated'
    elseif attempt > sample.sa then
      outcome = 'unknown'
    elseif attempt < sample.sa then
      outcome = 'fenced'
    elseif sample.st ~= 'scored' then
      store(d, i, sample, string.sub(ARGV[5], 8 * n - 7, 8 * n), ARGV[5 + n])
      touch(d)
      finished[#finished + 1] = d
    end
    outcomes[n] = outcome
  end
end
settle_all(finished)
return finish(exceptions(outcomes))
