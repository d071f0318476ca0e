-- Hop 1. request: worker, count, loaded, start, tasks = {{environment, index}, ...} proposed for draws start, start + 1, ...
-- Result: grants, why, facts, finished, next_draw, stale = the proposals did not reach; blobs = partials of those that have one.
local grants, blobs, granted, refusal, stale = {}, {}, {}, nil, false
local loaded
if request.loaded > 0 then
  local raw = call('HGET', K.versions, request.loaded)
  loaded = raw and cjson.decode(raw) or nil
end

local function pinned_version(step)
  local newest
  for number, v in pairs(versions()) do
    if v.step == step and valid(v) then newest = max(newest or number, number) end
  end
  return newest
end
local function start_of(least)
  if loaded and loaded.pub == 1 and effective(loaded.step, loaded.inc) >= least then return {loaded.step, loaded.inc} end
  return {least, get('incarnation')}
end
local function grant(d, i, queue)
  local g = group(d)
  local member = d .. ':' .. i
  if not g or granted[member] then return end
  local sample, pinned = g.s[i + 1], 0
  if sample.a >= rules.max_attempts then return fail(d, i, sample, 'attempts') end
  if g.p >= 0 then
    pinned = pinned_version(g.p)
    if not pinned then
      if queue == 'new' then enqueue('open', rank(d, i), member) end
      return
    end
  end
  local least = g.p < 0 and max(g.m, get('numbered') - rules.max_lag) or g.p
  if queue == 'open' then dequeue('open', member) end
  if queue == 'leases' and tonumber(call('ZSCORE', K.leases, member)) > 0 then add('expired', 1) end
  enqueue('leases', string.format('%.0f', now + rules.lease_ms), member)
  move(sample, 'leased')
  sample.a = sample.a + 1; sample.w = request.worker; sample.g = start_of(least)
  touch(d)
  granted[member] = true
  grants[#grants + 1] = {d, i, sample.a, g.e, g.x, g.n, least, pinned, sample.lp and 1 or 0}
  if sample.lp then blobs[#blobs + 1] = call('HGET', K.partials, member) end
end

local function grant_members(members, queue)
  local draws = {}
  for n, member in ipairs(members) do draws[n] = split(member) end
  preload(draws)
  for _, member in ipairs(members) do
    if #grants >= request.count then return end
    local d, i = split(member)
    grant(d, i, queue)
  end
end
-- Closing and pinned samples can make candidates fall away, so the first look is only a bounded part of the queues.
local function grant_queue(name, queue, top)
  local offset, page = 0, max(64, request.count)
  while #grants < request.count do
    local members = call('ZRANGEBYSCORE', K[name], '-inf', top, 'LIMIT', offset, page)
    if #members == 0 then return end
    local before = call('ZCARD', K[name])
    grant_members(members, queue)
    if #members < page then return end
    offset = offset + page - (before - call('ZCARD', K[name]))
  end
end

local function make_draw(task)
  local d, per_batch = get('next_draw'), rules.groups_per_batch
  local pinned = rules.pinned and max(0, floor(d / per_batch) - rules.max_lag) or -1
  local least = max(0, max(get('published'), 0) + floor(outstanding() / per_batch) - rules.max_lag)
  local samples, estimate = {}, get('estimate')
  for i = 1, rules.group_size do samples[i] = {st = 'open', a = 0, sa = 0, r = estimate} end
  groups[d] = {e = task[1], x = task[2], n = rules.group_size, t = now, m = pinned < 0 and least or pinned, p = pinned,
    st = 'open', k = 0, s = samples}
  touch(d)
  call('HINCRBY', K.cursor, task[1], 1)
  call('ZADD', K.unfinished, d, d)
  add('next_draw', 1); add('g:open', 1); add('s:open', rules.group_size); add('sequence', 1)
  add('reserved', rules.group_size * estimate)
  return d
end

grant_queue('leases', 'leases', string.format('%.0f', due()))
grant_queue('open', 'open', '+inf')
refusal = draw_refusal()
while #grants < request.count and not refusal do
  local task = request.tasks[get('next_draw') - request.start + 1]
  if get('next_draw') < request.start or not task then stale = true; break end
  local d = make_draw(task)
  for i = 0, rules.group_size - 1 do
    if #grants < request.count then grant(d, i, 'new') else enqueue('open', rank(d, i), d .. ':' .. i) end
  end
  refusal = draw_refusal()
end
local result = {grants = grants, finished = get('numbered') >= rules.steps, next_draw = get('next_draw'), stale = stale,
  epoch = get('epoch')}
local reply = finish(result, blobs)
if #grants == 0 and not stale then
  result.why = refusal or 'none'
  result.facts = {draw = get('next_draw'), published = get('published'), outstanding = outstanding(),
    open = call('ZCARD', K.open), leased = call('ZCARD', K.leases), bytes = get('bytes') + get('reserved'),
    numbered = get('numbered')}
  local topics = {}
  for topic in pairs(wake) do topics[#topics + 1] = topic end
  reply[1] = cjson.encode({r = result, w = topics})
end
return reply
