-- Hop 2, unfinished. request: leases, items = {{body bytes, steps, release 0 | 1}, ...}
preload_leases(request.leases)
local outcomes, position = {}, 1
for n, lease in ipairs(request.leases) do
  local item, sample, member = request.items[n], find(lease), lease[1] .. ':' .. lease[2]
  local body = string.sub(blob, position, position + item[1] - 1)
  position = position + item[1]
  if not sample then
    outcomes[n] = absent(lease)
  elseif lease[3] > sample.a then
    outcomes[n] = 'unknown'
  elseif lease[3] == sample.a and sample.st == 'partial' then
    outcomes[n] = 'accepted'
  elseif lease[3] < sample.a or sample.st ~= 'leased' then
    outcomes[n] = 'fenced'
  else
    call('HSET', K.partials, member, body)
    hold(sample, 'lp', item[1])
    sample.pp = #item[2] > 0 and item[2] or nil
    touch(lease[1])
    if item[3] == 1 then
      call('ZREM', K.leases, member)
      move(sample, 'partial')
      call('ZADD', K.open, rank(lease[1], lease[2]), member)
      wake.samples = true
    end
    outcomes[n] = 'accepted'
  end
end
return finish(outcomes)
