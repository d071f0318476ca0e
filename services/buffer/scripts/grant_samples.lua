-- Hop 1. request: worker, count, partial_bytes, loaded, start, tasks = {{environment, index}, ...} of the cursor's positions start, start + 1, ...
-- Result: groups = {{draw, environment, task, samples, least step, pinned version}, ...} of the grants, partials = positions of
-- grants that have one (blobs), why, facts, finished, position, stale = the proposals did not reach. Grants: see ledger.lua.
local blobs, partials, held, seen, refusal, stale = {}, {}, 0, {}, nil, false  -- held: bytes of the partials
local function room() return granted() < request.count and held < request.partial_bytes end
local deadline = string.format('%.0f', now + rules.lease_ms)
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
local starts = {}  -- by least step: the step from which a grant starts
local function start_of(least)
  local start = starts[least]
  if not start then
    local suffices = loaded and loaded.pub == 1 and effective(loaded.step, loaded.inc) >= least
    start = suffices and pack(STEP, loaded.step, loaded.inc) or pack(STEP, least, get('incarnation'))
    starts[least] = start
  end
  return start
end
-- The trainer publishes this step without any group that is not in a batch yet.
local too_old = get('numbered') - rules.max_lag
local to_come = max(get('published'), get('numbered') - get('numbered') % rules.publish_every)
local first = pack(TIME, now)
local function grant(d, i, queue)
  local g, name = group(d), member(d, i)
  if not g or seen[name] then return end
  local sample, pinned = sample_of(g, d, i + 1), 0
  if sample.a >= rules.max_attempts then
    fail(d, i, sample, 'attempts')
    return settle(d)
  end
  if g.p >= 0 then
    pinned = pinned_version(g.p)
    if not pinned then
      if queue == 'new' then enqueue('open', name, rank(d, i)) end
      return
    end
  end
  local least = g.p < 0 and max(min(g.m, to_come), too_old) or g.p
  if queue == 'open' then dequeue('open', name) end
  if queue == 'leases' and tonumber(call('ZSCORE', K.leases, name)) > 0 then add('expired', 1) end
  enqueue('leases', name, deadline)
  move(sample, 'leased')
  local since = sample.a > 0 and first_grant(sample) or first
  sample.a = sample.a + 1; sample.holder = start_of(least) .. since .. request.worker
  touch(d)
  seen[name] = true
  list_grant(d, i, sample.a, g, g.n, least, pinned)
  if sample.part ~= '' then
    partials[#partials + 1] = granted()
    held = held + partial_size(sample)
    blobs[#blobs + 1] = call('HGET', K.partials, name)
  end
end

local function grant_queue(queue, top)  -- changes are written at the end, so the queue stands still meanwhile
  local offset, page = 0, max(64, request.count)
  while room() do
    local members, draws = call('ZRANGEBYSCORE', K[queue], '-inf', top, 'LIMIT', offset, page), {}
    for n, sample in ipairs(members) do
      local d, i = split(sample)
      draws[n] = d
      want(d, i)
    end
    preload(draws)
    for _, sample in ipairs(members) do
      if not room() then return end
      local d, i = split(sample)
      grant(d, i, queue)
    end
    if #members < page then return end
    offset = offset + page
  end
end

-- How many tasks the draws have taken from the cursor: a requeued task is drawn again without it.
local function position() return get('next_draw') - get('x:requeued') end

grant_queue('leases', due())
grant_queue('open', '+inf')
refusal = draw_refusal()
while room() and not refusal do
  local task = request.tasks[position() - request.start + 1]
  if position() < request.start or not task then stale = true; break end
  call('HINCRBY', K.cursor, task[1], 1)
  local d = make_draw(task[1], task[2], 0)
  for i = 0, rules.group_size - 1 do
    if room() then grant(d, i, 'new') else enqueue('open', member(d, i), rank(d, i)) end
  end
  refusal = draw_refusal()
end
local result = {groups = grants.groups, partials = partials, finished = get('numbered') >= rules.steps,
  position = position(), stale = stale, epoch = meta.epoch}
save()
if granted() == 0 and not stale then
  result.why = refusal or 'none'
  result.facts = {draw = get('next_draw'), published = get('published'), outstanding = outstanding(),
    open = call('ZCARD', K.open), leased = call('ZCARD', K.leases), bytes = get('bytes') + get('reserved'),
    numbered = get('numbered')}
end
return reply(result, grant_rows(), blobs)
