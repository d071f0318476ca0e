-- Hop 4. request: incarnation, batch, most. Result: numbered, sequence, numbered_ms, finished, why, facts, full; or look = groups
-- to be looked at before anything is decided, when those are more than `most`. Rows, in and out: see `ages`.
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

-- The oldest step of each open group that must not exceed the bound, or NEVER. To look through thousands takes so long that
-- everybody would wait. So the caller has that done by ages.lua, a few at a time, and brings it along; what was told of a record
-- holds as long as the record, and the versions' lineage, are the same. Rows: digest of the lineage, then those of ages.lua.
local told, look
local function ages(draws)  -- nil: more than `most` groups are to be looked at
  local head, oldest, rows = digest(meta.lineage or ''), {}, {}
  local digests, position = {}, DIGEST_BYTES + 1
  if sub(ARGV[5], 1, DIGEST_BYTES) == head then
    while position <= #ARGV[5] do
      local d, own, step, after = unpacked(AGE, ARGV[5], position)
      digests[d] = own; oldest[d] = step
      position = after
    end
  end
  local unknown, records = {}, {}
  for first = 1, #draws, 1000 do
    local last = min(first + 999, #draws)
    local raw = call('HMGET', K.groups, unpack(draws, first, last))
    for n = first, last do
      local d, record = draws[n], raw[n - first + 1]
      if groups[d] then
        oldest[d] = age(groups[d])  -- changed by this very call, or not written yet
      elseif not digests[d] or digests[d] ~= digest(record) then
        unknown[#unknown + 1] = d; records[#records + 1] = record
      else
        rows[#rows + 1] = pack(AGE, d, digests[d], oldest[d])
      end
    end
  end
  if #unknown > request.most then
    look = unknown
  else
    for n, d in ipairs(unknown) do
      oldest[d] = age(unpack_group(records[n]))
      rows[#rows + 1] = pack(AGE, d, digest(records[n]), oldest[d])
    end
  end
  told = head .. table.concat(rows)
  return not look and oldest or nil
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
  local unfinished = unfinished_draws()
  local oldest_of_draw = ages(unfinished)
  if not oldest_of_draw then return nil, 'look' end
  local last, late = {}, {}  -- batch k -> groups that may be in it at the latest, left behind by this one; the first open one
  local function leave(k) if k >= batch then last[k] = (last[k] or 0) + 1 end end
  for n = per_batch + 1, #chosen do
    local d, lag = unpack(chosen[n])
    if rules.over_lag[environments[d]] == 'wait' then leave(batch + rules.max_lag - lag) end
  end
  for _, d in ipairs(unfinished) do
    local oldest = oldest_of_draw[d]
    if oldest ~= NEVER then
      local k = oldest + rules.max_lag + 1
      leave(k)
      late[k] = late[k] or d
    end
  end
  local left, first = 0, nil
  for k = batch, batch + rules.max_lag do
    left = left + (last[k] or 0)
    first = late[k] and min(first or late[k], late[k]) or first
    if first and left > (k - batch) * per_batch then
      local waits = facts_of({first}, 0)
      waits.last = k; waits.left = left
      return nil, 'oldest', waits
    end
  end
  local taken = {}
  for n = 1, per_batch do taken[n] = chosen[n] end
  table.sort(taken, function(a, b) return a[1] < b[1] end)
  return taken
end

local chosen, why, facts
if rules.pinned then chosen, why, facts = choose_pinned() else chosen, why, facts = choose() end
if look then return finish({look = look}, told) end
if not chosen then
  return finish({numbered = false, why = why, facts = facts, full = draw_refusal() == 'bytes' and numbered > committed}, told)
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
return finish({numbered = true, sequence = get('sequence'), numbered_ms = now}, told)
