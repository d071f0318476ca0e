-- Hop 3. request: leases, sizes of the scores
preload_leases(request.leases)
local outcomes, position = {}, 1
for n, lease in ipairs(request.leases) do
  local sample, member, size = find(lease), lease[1] .. ':' .. lease[2], request.sizes[n]
  local score = string.sub(blob, position, position + size - 1)
  position = position + size
  if not sample then
    outcomes[n] = absent(lease)
  elseif sample.st == 'closed' then
    outcomes[n] = 'outdated'
  elseif lease[3] > sample.sa then
    outcomes[n] = 'unknown'
  elseif lease[3] < sample.sa then
    outcomes[n] = 'fenced'
  elseif sample.st == 'scored' then
    outcomes[n] = 'accepted'
  else
    dequeue('scoring', member)
    if sample.lt then forget('transcripts', member) end
    hold(sample, 'lt', 0)
    put('scores', member, score)
    hold(sample, 'ls', size)
    move(sample, 'scored')
    touch(lease[1])
    settle(lease[1])
    outcomes[n] = 'accepted'
  end
end
return finish(outcomes)
