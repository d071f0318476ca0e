-- Hop 4. request: incarnation, batch. Result: numbered, sequence, numbered_ms, finished, why, facts, full.
-- Chosen rows: {draw, lag, mask below, 1 when it has no signal}.
local batch, numbered, committed = request.batch, get('numbered'), get('committed')
local per_batch, fenced = rules.groups_per_batch, fence(request.incarnation)
if fenced then return fenced end
if batch <= committed or batch > numbered + 1 then return out_of_range(batch) end
if batch > rules.steps then return finish({numbered = false, finished = true}) end
if batch <= numbered then
  local raw = call('HGET', K.batches, batch)  -- none: known from the log alone, since the ledger was rebuilt
  local record = raw and cjson.decode(raw) or {q = 0, t = 0}
  return finish({numbered = true, sequence = record.q, numbered_ms = record.t})
end

local function facts_of(unfinished, missing, count)
  local facts = {batch = batch, undrawn = missing, of = per_batch, unfinished = count or #unfinished + missing}
  if unfinished[1] then
    for i, sample in ipairs(samples(group(unfinished[1]))) do
      if not TERMINAL[sample.st] then
        facts.draw = unfinished[1]; facts.index = i - 1; facts.state = sample.st
        facts.worker = worker_of(sample); facts.scorer = sample.scorer
        break
      end
    end
  end
  return facts
end
local function unfinished_draws()
  local draws = {}
  for n, d in ipairs(call('ZRANGE', K.unfinished, 0, -1)) do draws[n] = tonumber(d) end
  return draws
end

local function choose_pinned()
  local first, unfinished, chosen, draws = (batch - 1) * per_batch, {}, {}, {}
  local missing = max(0, first + per_batch - max(get('next_draw'), first))
  for n = 1, per_batch do draws[n] = first + n - 1 end
  preload(draws)
  for _, d in ipairs(draws) do
    local g = groups[d]
    if g and g.st == 'open' then unfinished[#unfinished + 1] = d end
  end
  if missing > 0 or #unfinished > 0 then return nil, 'unfinished', facts_of(unfinished, missing) end
  for _, d in ipairs(draws) do
    if groups[d] then chosen[#chosen + 1] = {d, batch - 1 - groups[d].p, 0} end
  end
  return chosen
end

local function choose()
  local ready, chosen, environments = {}, {}, {}
  for n, entry in ipairs(call('XRANGE', K.ready, '-', '+')) do  -- {id, {'draw', d, 'environment', e, 'steps', pairs}}
    local d = tonumber(entry[2][2])
    ready[n] = {d, entry[2][6]}
    environments[d] = entry[2][4]
  end
  table.sort(ready, function(a, b) return a[1] < b[1] end)
  local least = max(0, batch - 1 - rules.max_lag)
  for _, pair in ipairs(ready) do
    local d, oldest, newest = pair[1], bounds(pair[2])
    local lag = batch - 1 - oldest
    if lag <= rules.max_lag then
      chosen[#chosen + 1] = {d, lag, 0}
    elseif rules.over_lag[environments[d]] == 'mask' and newest >= least then
      chosen[#chosen + 1] = {d, lag, least}
    else
      drop(d, 'lag')
    end
  end
  table.sort(chosen, function(a, b) return a[2] > b[2] or (a[2] == b[2] and a[1] < b[1]) end)
  if #chosen < per_batch then
    local unfinished = unfinished_draws()
    local missing = max(0, per_batch - #chosen - #unfinished)
    return nil, 'unfinished', facts_of(unfinished, missing, per_batch - #chosen)
  end
  local unfinished, last, late = unfinished_draws(), {}, {}  -- last: a batch that may take a group that this one leaves behind
  preload(unfinished)
  for _, d in ipairs(unfinished) do environments[d] = groups[d].e end
  local function leave(d, k, open)
    if k < batch or rules.over_lag[environments[d]] ~= 'wait' then return end
    last[#last + 1] = k
    if open then late[#late + 1] = {d, k} end
  end
  for n = per_batch + 1, #chosen do leave(chosen[n][1], batch + rules.max_lag - chosen[n][2], false) end
  for _, d in ipairs(unfinished) do
    local oldest = oldest_granted(groups[d])
    if oldest then leave(d, oldest + rules.max_lag + 1, true) end
  end
  for k = batch, batch + rules.max_lag do
    local left, first = 0, nil
    for _, other in ipairs(last) do if other <= k then left = left + 1 end end
    for _, pair in ipairs(late) do if pair[2] <= k then first = first or pair[1] end end
    if first and left > (k - batch) * per_batch then
      local waits = facts_of({first}, 0)
      waits.last = k; waits.left = left
      return nil, 'oldest', waits
    end
  end
  local first = {}
  for n = 1, per_batch do first[n] = chosen[n] end
  table.sort(first, function(a, b) return a[1] < b[1] end)
  return first
end

local chosen, why, facts
if rules.pinned then chosen, why, facts = choose_pinned() else chosen, why, facts = choose() end
if not chosen then
  return finish({numbered = false, why = why, facts = facts, full = draw_refusal() == 'bytes' and numbered > committed})
end
local draws, read_ids = {}, {}
for n, c in ipairs(chosen) do draws[n] = c[1] end
preload(draws)
for n, d in ipairs(draws) do
  local g = groups[d]
  move_group(g, 'batched')
  g.k = batch
  read_ids[n] = g.rid
  g.rid = ''
  chosen[n][4] = g.quiet
  touch(d)
end
flush(K.ready, read_ids, 'XDEL')
set('numbered', batch); set('resampled', 0)
local drops = {}
for n, d in ipairs(call('LRANGE', K.drops, 0, -1)) do drops[n] = cjson.decode(d) end
call('DEL', K.drops)
local live = unfinished_draws()  -- and those that are ready, but not in this batch
for _, entry in ipairs(call('XRANGE', K.ready, '-', '+')) do live[#live + 1] = tonumber(entry[2][2]) end
table.sort(live)
call('HSET', K.batches, batch, cjson.encode({
  g = chosen, d = drops, q = get('sequence'), t = now, n = get('next_draw'), u = live}))
log('events', {event = 'batch', batch = batch, groups = #chosen})
wake.ready = true; wake.samples = true
return finish({numbered = true, sequence = get('sequence'), numbered_ms = now})
