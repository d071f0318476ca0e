-- Hop 2. request: leases, items = {{crc, tokens, generated, steps, body bytes, transcript bytes, score bytes, failure}, ...}
preload_leases(request.leases)
local outcomes, position = {}, 1
local function take(size)
  local part = string.sub(blob, position, position + size - 1)
  position = position + size
  return part
end
local function store(d, i, sample, item, body, transcript, score)
  local member = d .. ':' .. i
  dequeue('leases', member)
  unreserve(sample)
  if sample.lp then forget('partials', member) end
  hold(sample, 'lp', 0)
  sample.pp = nil
  sample.c = item[1]; sample.tok = item[2]; sample.gen = item[3]; sample.sp = item[4]
  put('bodies', member, body)
  hold(sample, 'lb', item[5])
  set('estimate', get('estimate') + floor((item[5] + item[6] - get('estimate')) / 16))
  touch(d)
  if item[7] > 0 then
    move(sample, 'scored')
    put('scores', member, score)
    hold(sample, 'ls', item[7])
    return settle(d)
  end
  move(sample, 'unscored')
  put('transcripts', member, transcript)
  hold(sample, 'lt', item[6])
  call('XADD', K.unscored, '*', 's', member)
  wake.unscored = true
end
for n, lease in ipairs(request.leases) do
  local item, sample = request.items[n], find(lease)
  local body, transcript, score = take(item[5]), take(item[6]), take(item[7])
  if not sample then
    outcomes[n] = absent(lease)
  elseif sample.st == 'closed' then
    outcomes[n] = 'outdated'
  elseif lease[3] > sample.a then
    outcomes[n] = 'unknown'
  elseif lease[3] < sample.a or sample.st == 'partial' then
    outcomes[n] = 'fenced'
  elseif sample.st ~= 'leased' then
    outcomes[n] = sample.c == item[1] and 'accepted' or 'conflict'
  elseif item[8] ~= '' then
    fail(lease[1], lease[2], sample, item[8])
    outcomes[n] = 'accepted'
  else
    store(lease[1], lease[2], sample, item, body, transcript, score)
    outcomes[n] = 'accepted'
  end
end
return finish(outcomes)
