-- Hop 3. Blobs: the score of each lease
local outcomes, n = {}, 0
local function store(d, i, sample, score)
  local name = member(d, i)
  local _, _, _, _, transcript = unpacked(BODY, sample.info)
  dequeue('scoring', name)
  forget('transcripts', name)
  put('scores', name, score)
  hold(group(d), #score - transcript)
  move(sample, 'scored')
end
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  local finished = false
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
      store(d, i, sample, ARGV[5 + n])
      finished = true
    end
    outcomes[n] = outcome
  end
  if finished then
    touch(d)
    settle(d)
  end
end
return finish(exceptions(outcomes))
