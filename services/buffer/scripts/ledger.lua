-- What every script of the ledger shares; the Lua twin of memory_state.py, which documents the records.
-- ARGV: [1] the time in ms (0 = ask Redis, the only clock of production), [2] rules, [3] request (JSON), [4] blobs, joined.
-- Reply: {JSON {r = result, w = topics that changed}, blob, blob, ...}. SAMPLE_EDGES and GROUP_EDGES are put in front of this.
local NAMES = {'meta', 'groups', 'open', 'leases', 'scoring', 'bodies', 'transcripts', 'scores', 'partials', 'unscored', 'ready',
  'events', 'dead', 'drops', 'batches', 'versions', 'holds', 'unfinished', 'cursor'}
local K = {}
for i, name in ipairs(NAMES) do K[name] = KEYS[i] end
local call, floor, max, min = redis.call, math.floor, math.max, math.min
local rules, request, blob = cjson.decode(ARGV[2]), cjson.decode(ARGV[3]), ARGV[4]
local now = tonumber(ARGV[1])
if now == 0 then
  local t = call('TIME')
  now = t[1] * 1000 + floor(t[2] / 1000)
end
local TERMINAL = {scored = true, closed = true}

-- counters
local meta, meta_dirty = {}, {}
local flat = call('HGETALL', K.meta)
for i = 1, #flat, 2 do meta[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1] end
local function get(name) return meta[name] or 0 end
local function set(name, value) meta[name] = value; meta_dirty[name] = true end
local function add(name, delta) set(name, get(name) + delta) end
local lineage = meta.lineage and cjson.decode(meta.lineage) or {}

-- records, read once and written once; as MessagePack, which Redis packs four times as fast as JSON
local groups, groups_dirty = {}, {}
local function preload(draws)
  local wanted, seen = {}, {}
  for _, d in ipairs(draws) do
    if groups[d] == nil and not seen[d] then seen[d] = true; wanted[#wanted + 1] = d end
  end
  for first = 1, #wanted, 1000 do
    local last = min(first + 999, #wanted)
    local raw = call('HMGET', K.groups, unpack(wanted, first, last))
    for i = first, last do groups[wanted[i]] = raw[i - first + 1] and cmsgpack.unpack(raw[i - first + 1]) or false end
  end
end
local function group(d)
  if groups[d] == nil then preload({d}) end
  return groups[d]
end
local function touch(d) groups_dirty[d] = true end

local function flush(key, list, command)
  for first = 1, #list, 1000 do call(command, key, unpack(list, first, min(first + 999, #list))) end
end
-- Values of hashes that are written together at the end: key name -> {field, value, ...}
local writes = {bodies = {}, transcripts = {}, scores = {}, partials = {}}
local deletes = {bodies = {}, transcripts = {}, scores = {}, partials = {}}
local scores_of = {leases = {}, scoring = {}, open = {}}
local removals = {leases = {}, scoring = {}, open = {}}
local function put(name, member, value) local w = writes[name]; w[#w + 1] = member; w[#w + 1] = value end
local function dequeue(name, member) local w = removals[name]; w[#w + 1] = member end
local function forget(name, member) local w = deletes[name]; w[#w + 1] = member end
local wake = {}

local function finish(result, blobs)
  for name, list in pairs(writes) do flush(K[name], list, 'HSET') end
  for name, list in pairs(deletes) do flush(K[name], list, 'HDEL') end
  for name, list in pairs(removals) do flush(K[name], list, 'ZREM') end
  for name, list in pairs(scores_of) do flush(K[name], list, 'ZADD') end
  local list, gone = {}, {}
  for d in pairs(groups_dirty) do
    if groups[d] then list[#list + 1] = d; list[#list + 1] = cmsgpack.pack(groups[d]) else gone[#gone + 1] = d end
  end
  flush(K.groups, list, 'HSET')
  flush(K.groups, gone, 'HDEL')
  list = {}
  for name in pairs(meta_dirty) do
    list[#list + 1] = name
    list[#list + 1] = type(meta[name]) == 'number' and string.format('%.0f', meta[name]) or meta[name]
  end
  flush(K.meta, list, 'HSET')
  local topics = {}
  for topic in pairs(wake) do topics[#topics + 1] = topic end
  local reply = {cjson.encode({r = result, w = topics})}
  for _, b in ipairs(blobs or {}) do reply[#reply + 1] = b end
  return reply
end

-- the state machines
local function move(sample, state)
  if not SAMPLE_EDGES[sample.st][state] then error('a sample cannot go from ' .. sample.st .. ' to ' .. state) end
  add('s:' .. sample.st, -1); add('s:' .. state, 1); add('sequence', 1)
  if rules.edges then add('es:' .. sample.st .. '>' .. state, 1) end
  sample.st = state
end
local function move_group(g, state)
  if not GROUP_EDGES[g.st][state] then error('a group cannot go from ' .. g.st .. ' to ' .. state) end
  add('g:' .. g.st, -1); add('g:' .. state, 1); add('sequence', 1)
  if rules.edges then add('eg:' .. g.st .. '>' .. state, 1) end
  g.st = state
end
local function hold(sample, field, size)
  add('bytes', size - (sample[field] or 0))
  sample[field] = size > 0 and size or nil
end
local function unreserve(sample) add('reserved', -(sample.r or 0)); sample.r = nil end
local function rank(d, i) return string.format('%.0f', d * 65536 + i) end
local function enqueue(name, score, member)  -- ZADD at the end; a member that leaves in the same script is struck out by unqueue
  local list = scores_of[name]
  list[#list + 1] = score; list[#list + 1] = member
end
local function unqueue(name, member)
  local list = scores_of[name]
  for i = #list, 2, -2 do
    if list[i] == member then table.remove(list, i); table.remove(list, i - 1) end
  end
  call('ZREM', K[name], member)
end
local function free_parts(member, sample)
  for field, name in pairs({lb = 'bodies', lt = 'transcripts', ls = 'scores', lp = 'partials'}) do
    if sample[field] then
      local w = writes[name]
      for i = #w - 1, 1, -2 do
        if w[i] == member then table.remove(w, i); table.remove(w, i) end
      end
      forget(name, member)
    end
    hold(sample, field, 0)
  end
end
local function log(name, line) call('XADD', K[name], '*', 'line', cjson.encode(line)) end

local function close(d, i, sample, reason)
  local member = d .. ':' .. i
  unqueue('open', member); unqueue('leases', member); unqueue('scoring', member)
  unreserve(sample)
  free_parts(member, sample)
  move(sample, 'closed')
  sample.why = reason
end
local function free(d)
  local g = groups[d]
  for i, sample in ipairs(g.s) do free_parts(d .. ':' .. (i - 1), sample) end
  groups[d] = false
  touch(d)
end
local function drop(d, reason)
  local g, tokens = group(d), 0
  for i, sample in ipairs(g.s) do
    if not TERMINAL[sample.st] then close(d, i - 1, sample, reason) end
    tokens = tokens + (sample.gen or 0)
  end
  if g.st == 'open' then call('ZREM', K.unfinished, d) end
  move_group(g, 'dropped')
  if g.rid then call('XDEL', K.ready, g.rid) end
  free(d)
  add('dropped', 1); add('x:' .. reason, 1)
  call('RPUSH', K.drops, cjson.encode({d, reason}))
  log('dead', {draw = d, reason = reason, environment = g.e, generated_tokens = tokens})
  wake.samples = true; wake.ready = true
end
local function settle(d)
  local g, closed, scored = group(d), false, false
  for _, sample in ipairs(g.s) do
    if not TERMINAL[sample.st] then return end
    if sample.st == 'closed' then closed = true else scored = true end
  end
  if not scored then return drop(d, 'failed') end
  move_group(g, closed and 'short' or 'complete')
  call('ZREM', K.unfinished, d)
  g.rid = call('XADD', K.ready, '*', 'draw', d)
  if rules.pinned or get('g:complete') + get('g:short') >= rules.groups_per_batch then wake.ready = true end
end
local function fail(d, i, sample, reason)
  close(d, i, sample, 'failed')
  touch(d)
  log('dead', {draw = d, index = i, reason = reason})
  settle(d)
end

-- lookups. A lease is {draw, sample, attempt, epoch}.
local function find(lease)
  local g = lease[4] == get('epoch') and group(lease[1])
  return g and g.s[lease[2] + 1] or nil
end
local function absent(lease)  -- outcome for a lease without a record
  local epoch = get('epoch')
  if lease[4] < epoch then return 'outdated' end
  if lease[4] == epoch and lease[1] < get('next_draw') and not group(lease[1]) then return 'outdated' end
  return 'unknown'
end
local function preload_leases(leases)
  local draws = {}
  for i, lease in ipairs(leases) do draws[i] = lease[1] end
  preload(draws)
end
local function effective(step, incarnation)
  local fork
  for _, pair in ipairs(lineage) do
    if pair[1] > incarnation and (not fork or pair[2] < fork) then fork = pair[2] end
  end
  return (not fork or step <= fork) and step or 2 * fork - step
end
local function valid(v) return v.pub == 1 and v.del == 0 and effective(v.step, v.inc) == v.step end
local function bounds(g)
  local oldest, newest
  for _, sample in ipairs(g.s) do
    if sample.st == 'scored' then
      for _, pair in ipairs(sample.sp) do
        local step = effective(pair[1], pair[2])
        oldest = min(oldest or step, step); newest = max(newest or step, step)
      end
    end
  end
  return oldest, newest
end
local function oldest_granted(g)
  local oldest
  local function see(pair)
    local step = effective(pair[1], pair[2])
    oldest = min(oldest or step, step)
  end
  for _, sample in ipairs(g.s) do
    if sample.st == 'leased' or sample.st == 'partial' then
      see(sample.g)
      for _, pair in ipairs(sample.pp or {}) do see(pair) end
    elseif sample.sp then
      for _, pair in ipairs(sample.sp) do see(pair) end
    end
  end
  return oldest
end
local all_versions
local function versions()
  if not all_versions then
    all_versions = {}
    local raw = call('HGETALL', K.versions)
    for i = 1, #raw, 2 do all_versions[tonumber(raw[i])] = cjson.decode(raw[i + 1]) end
  end
  return all_versions
end

-- budget
local function outstanding()
  return get('next_draw') - get('dropped') - rules.groups_per_batch * min(max(get('published'), 0), get('numbered'))
end
local function draw_refusal()
  local draw, per_batch = get('next_draw'), rules.groups_per_batch
  if get('published') < 0 then return 'first_version' end
  if (rules.pinned and draw or draw - get('dropped')) >= rules.steps * per_batch then return 'drawn' end
  if rules.pinned and get('published') < max(0, floor(draw / per_batch) - rules.max_lag) then return 'version' end
  if not rules.pinned and outstanding() >= (rules.max_lag + 1) * per_batch then return 'budget' end
  local needed = get('bytes') + get('reserved') + rules.group_size * get('estimate')
  local freeable = get('numbered') > get('committed') or get('g:open') > 0
  return needed > rules.quota_bytes and freeable and 'bytes' or nil
end
local function refuse(code, facts) return {cjson.encode({refused = code, facts = facts})} end
local function due() return now >= get('grace') and now or 0 end
local function split(member)
  local d, i = string.match(member, '(%d+):(%d+)')
  return tonumber(d), tonumber(i)
end
