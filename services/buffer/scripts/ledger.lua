-- What every script of the ledger shares; the Lua twin of memory_state.py, which documents the records.
-- ARGV: [1] the time in ms (0 = ask Redis, the only clock of production), [2] rules, [3] request (both JSON),
-- [4] the leases that it is about (see `read_leases`), [5] what else is known of each, packed, [6] ... their blobs.
-- Reply: {JSON {r = result, w = topics that changed}, packed rows, blob, blob, ...}.
-- SAMPLE_EDGES and GROUP_EDGES are put in front of this. Layouts are those of rows.py.
-- request.script is the name of the script, of which this is the beginning. What it holds is small: to collect garbage at four
-- times that, not at twice, costs a megabyte and spares the server every other round.
collectgarbage('setpause', 400)
local NAMES = {'meta', 'groups', 'open', 'leases', 'scoring', 'bodies', 'transcripts', 'scores', 'partials', 'unscored', 'ready',
  'events', 'dead', 'drops', 'batches', 'versions', 'holds', 'unfinished', 'cursor'}
local K = {}
for i, name in ipairs(NAMES) do K[name] = KEYS[i] end
local call, floor, max, min, pack, unpacked = redis.call, math.floor, math.max, math.min, struct.pack, struct.unpack
local sub = string.sub
local rules, request = cjson.decode(ARGV[2]), cjson.decode(ARGV[3])
local now = tonumber(ARGV[1])
if now == 0 then
  local t = call('TIME')
  now = t[1] * 1000 + floor(t[2] / 1000)
end
local TERMINAL = {scored = true, closed = true}

-- counters
local meta, changed = {}, {}
local flat = call('HGETALL', K.meta)
if #flat == 0 and not request.schema then  -- emptied; `open` alone may begin
  return {cjson.encode({refused = 'unopened', facts = {run = rules.run}})}
end
for i = 1, #flat, 2 do meta[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1] end
if not request.schema and meta.schema ~= rules.schema then  -- another release took the ledger over since this front opened it
  return {cjson.encode({refused = 'overtaken', facts = {found = meta.schema or '?', known = rules.schema, run = rules.run}})}
end
local function get(name) return meta[name] or 0 end
local function set(name, value)
  meta[name] = value
  changed[name] = true
end
local function add(name, delta) set(name, (meta[name] or 0) + delta) end
local lineage = meta.lineage and cjson.decode(meta.lineage) or {}

-- Records: read once, written once. A group is its own fields and then its samples, which stay packed until somebody looks.
-- A sample: st state, a attempt, sa scoring attempt, holder = STEP from which its grant started, time of its first grant, worker;
-- part = size of a partial, its steps; info of the body = BODY, its steps; scorer = worker; ended = reason of closing, or reward.
-- '' = none yet.
local GROUP = '<I4c0I8I2I8I8i8BBsI8I4I8I2c0'
local SAMPLE = '<sI2I2I4c0I4c0I4c0I4c0I4c0'
local STEP = '<I4I4'  -- step, incarnation; `steps` are any number of them
local BODY = '<I4I4I4I4I4I4'  -- crc, tokens, generated tokens, bytes of body, transcript, body in the object store: 24 bytes
local function unpack_group(raw)
  local e, x, n, t, m, p, q, quiet, st, k, r, b, rid, rest = unpacked(GROUP, raw)
  return {e = e, x = x, n = n, t = t, m = m, p = p, q = q, quiet = quiet, st = st, k = k, r = r, b = b, rid = rid, raw = raw,
    rest = rest}
end
local function unpack_sample(raw, position)
  local st, a, sa, holder, part, info, scorer, ended, after = unpacked(SAMPLE, raw, position)
  return {st = st, a = a, sa = sa, holder = holder, part = part, info = info, scorer = scorer, ended = ended}, after
end
local function pack_sample(s)
  return pack(SAMPLE, s.st, s.a, s.sa, #s.holder, s.holder, #s.part, s.part, #s.info, s.info, #s.scorer, s.scorer, #s.ended,
    s.ended)
end
local function samples(g)  -- all of them
  if g.s then return g.s end
  local list, raw, position, some, at = {}, g.raw, g.rest, g.some, g.at
  for i = 1, g.n do
    if at then  -- some are unpacked already
      list[i] = some[i] or unpack_sample(raw, at[i])
    else
      list[i], position = unpack_sample(raw, position)
    end
  end
  g.s = list
  return list
end
-- One sample, from 1. Calls are about a few samples of many groups, and the others stay packed: `some` are those that somebody
-- looked at, `at` is where each begins. `wanted`, draw -> {position = true}, are known before.
local wanted = {}
local function want(d, i)
  local these = wanted[d]
  if not these then
    these = {}
    wanted[d] = these
  end
  these[i + 1] = true
end
local function cut(g, d)
  local at, some, raw, position, these = {}, {}, g.raw, g.rest, wanted[d] or {}
  for i = 1, g.n do
    at[i] = position
    if these[i] then
      some[i], position = unpack_sample(raw, position)
    else
      position = select(9, unpacked(SAMPLE, raw, position))
    end
  end
  g.at, g.some = at, some
end
local function sample_of(g, d, i)
  if g.s then return g.s[i] end
  if i > g.n then return nil end
  if not g.at then cut(g, d) end
  if not g.some[i] then g.some[i] = unpack_sample(g.raw, g.at[i]) end
  return g.some[i]
end
local function state_of(g, i)  -- of a sample in a group of which one was looked at
  local sample = g.s and g.s[i] or g.some[i]
  return sample and sample.st or (unpacked('<s', g.raw, g.at[i]))
end
local function pack_group(g)
  local parts = {pack(GROUP, #g.e, g.e, g.x, g.n, g.t, g.m, g.p, g.q, g.quiet, g.st, g.k, g.r, g.b, #g.rid, g.rid)}
  if g.s then
    for i, s in ipairs(g.s) do parts[i + 1] = pack_sample(s) end
  elseif g.some then
    local first = 1  -- of those that were packed all the time and are not in `parts` yet
    for i = 1, g.n do
      if g.some[i] then
        if first < i then parts[#parts + 1] = sub(g.raw, g.at[first], g.at[i] - 1) end
        parts[#parts + 1] = pack_sample(g.some[i])
        first = i + 1
      end
    end
    if first <= g.n then parts[#parts + 1] = sub(g.raw, g.at[first]) end
  else
    parts[2] = sub(g.raw, g.rest)
  end
  return table.concat(parts)
end
local function new_group(e, x, n, least, pinned, requeues, reserved)
  local list = {}
  for i = 1, n do list[i] = {st = 'open', a = 0, sa = 0, holder = '', part = '', info = '', scorer = '', ended = ''} end
  return {e = e, x = x, n = n, t = now, m = least, p = pinned, q = requeues, quiet = 0, st = 'open', k = 0, r = reserved, b = 0,
    rid = '', s = list}
end
local groups, groups_dirty = {}, {}
local function preload(draws)
  local wanted, seen = {}, {}
  for _, d in ipairs(draws) do
    if groups[d] == nil and not seen[d] then seen[d] = true; wanted[#wanted + 1] = d end
  end
  for first = 1, #wanted, 1000 do
    local last = min(first + 999, #wanted)
    local raw = call('HMGET', K.groups, unpack(wanted, first, last))
    for i = first, last do groups[wanted[i]] = raw[i - first + 1] and unpack_group(raw[i - first + 1]) or false end
  end
end
local function group(d)
  if groups[d] == nil then preload({d}) end
  return groups[d]
end
local function touch(d) groups_dirty[d] = true end

-- names of samples in Redis
local digits, prefixes = {}, {}
local function member(d, i)
  local prefix, digit = prefixes[d], digits[i]
  if not prefix then
    prefix = string.format('%.0f:', d)
    prefixes[d] = prefix
  end
  if not digit then
    digit = tostring(i)
    digits[i] = digit
  end
  return prefix .. digit
end
local function split(name)
  local d, i = string.match(name, '(%d+):(%d+)')
  return tonumber(d), tonumber(i)
end
local function rank(d, i) return string.format('%.0f', d * 65536 + i) end

-- What is written together at the end: member -> value, or false to take it away; the last word counts.
local hashes = {bodies = {}, transcripts = {}, scores = {}, partials = {}}
local queues = {leases = {}, scoring = {}, open = {}}
local arrived, wake = {}, {}
local function put(name, key, value) hashes[name][key] = value end
local function forget(name, key) hashes[name][key] = false end
local function enqueue(name, key, score) queues[name][key] = score end
local function dequeue(name, key) queues[name][key] = false end
local MEMBER = '<I8I4'
local function announce(d, i)  -- to those who score
  arrived[#arrived + 1] = pack(MEMBER, d, i)
  wake.unscored = true
end

local function flush(key, list, command)
  for first = 1, #list, 1000 do call(command, key, unpack(list, first, min(first + 999, #list))) end
end
local function flush_table(key, entries, write, remove)
  local list, gone, n, score_first = {}, {}, 0, write == 'ZADD'
  for name, value in pairs(entries) do
    if not value then
      gone[#gone + 1] = name
    else
      n = n + 2
      if score_first then list[n - 1] = value; list[n] = name else list[n - 1] = name; list[n] = value end
    end
  end
  flush(key, gone, remove)
  flush(key, list, write)
end
local function save()
  for name, entries in pairs(hashes) do flush_table(K[name], entries, 'HSET', 'HDEL') end
  for name, entries in pairs(queues) do flush_table(K[name], entries, 'ZADD', 'ZREM') end
  for first = 1, #arrived, 64 do  -- so that whoever scores a few does not read through thousands
    call('XADD', K.unscored, '*', 's', table.concat(arrived, '', first, min(first + 63, #arrived)))
  end
  local records, counters = {}, {}
  for d in pairs(groups_dirty) do records[d] = groups[d] and pack_group(groups[d]) end
  flush_table(K.groups, records, 'HSET', 'HDEL')
  for name in pairs(changed) do
    counters[name] = type(meta[name]) == 'number' and string.format('%.0f', meta[name]) or meta[name]
  end
  flush_table(K.meta, counters, 'HSET', 'HDEL')
end
local function reply(result, rows, blobs)
  local topics = {}
  for topic in pairs(wake) do topics[#topics + 1] = topic end
  local answer = {cjson.encode({r = result, w = topics}), rows or ''}
  for n, b in ipairs(blobs or {}) do answer[n + 2] = b end
  return answer
end
local function finish(result, rows, blobs)
  save()
  return reply(result, rows, blobs)
end
local function exceptions(outcomes)  -- outcomes other than the usual one: {{position, outcome}, ...}
  local list = {}
  for n, outcome in ipairs(outcomes) do
    if outcome ~= 'accepted' then list[#list + 1] = {n, outcome} end
  end
  return list
end
local function refuse(code, facts) return {cjson.encode({refused = code, facts = facts})} end

-- the state machines
local COUNTER = {}
for state in pairs(SAMPLE_EDGES) do COUNTER[state] = 's:' .. state end
local function move(sample, state)
  local old = sample.st
  if not SAMPLE_EDGES[old][state] then error('a sample cannot go from ' .. old .. ' to ' .. state) end
  local from, to = COUNTER[old], COUNTER[state]
  meta[from] = (meta[from] or 0) - 1; meta[to] = (meta[to] or 0) + 1; meta.sequence = (meta.sequence or 0) + 1
  changed[from] = true; changed[to] = true; changed.sequence = true
  if rules.edges then add('es:' .. old .. '>' .. state, 1) end
  sample.st = state
end
local function move_group(g, state)
  if not GROUP_EDGES[g.st][state] then error('a group cannot go from ' .. g.st .. ' to ' .. state) end
  add('g:' .. g.st, -1); add('g:' .. state, 1); add('sequence', 1)
  if rules.edges then add('eg:' .. g.st .. '>' .. state, 1) end
  g.st = state
end
local function hold(g, bytes)  -- so many more, or fewer
  add('bytes', bytes)
  g.b = g.b + bytes
end
local function partial_size(sample) return sample.part == '' and 0 or (unpacked('<I4', sample.part)) end
local function steps_of(sample) return string.sub(sample.info, 25) end
local function worker_of(sample) return string.sub(sample.holder, 17) end
local function first_grant(sample) return string.sub(sample.holder, 9, 16) end  -- '' before it; see TIME
local TIME = '<I8'
local RESERVED = {open = true, leased = true, partial = true}  -- a sample in these holds the estimate `r` and its partial
local function log(name, line) call('XADD', K[name], '*', 'line', cjson.encode(line)) end

local function close(d, i, sample, reason)
  local name, g = member(d, i), group(d)
  dequeue('open', name); dequeue('leases', name); dequeue('scoring', name)
  forget('bodies', name); forget('transcripts', name); forget('partials', name)
  if RESERVED[sample.st] then
    add('reserved', -g.r)
    hold(g, -partial_size(sample))
  else
    local _, _, _, body, transcript = unpacked(BODY, sample.info)
    hold(g, -body - transcript)
  end
  move(sample, 'closed')
  sample.ended = reason
end
local function free(d)  -- a group without unfinished samples: it has bodies and scores
  local g = group(d)
  for i = 0, g.n - 1 do
    local name = member(d, i)
    forget('bodies', name); forget('scores', name)
  end
  add('bytes', -g.b)
  groups[d] = false
  touch(d)
end
local function outstanding()
  return get('next_draw') - get('dropped') - rules.groups_per_batch * min(max(get('published'), 0), get('numbered'))
end
-- Open a group: reserves budget and bytes. The caller grants its samples or puts them into the open queue.
local function make_draw(environment, index, requeues)
  local d, per_batch, estimate = get('next_draw'), rules.groups_per_batch, get('estimate')
  local pinned = rules.pinned and max(0, floor(d / per_batch) - rules.max_lag) or -1
  local least = max(0, max(get('published'), 0) + floor(outstanding() / per_batch) - rules.max_lag)
  groups[d] = new_group(environment, index, rules.group_size, pinned < 0 and least or pinned, pinned, requeues, estimate)
  touch(d)
  call('ZADD', K.unfinished, d, d)
  add('next_draw', 1); add('g:open', 1); add('s:open', rules.group_size); add('sequence', 1)
  add('reserved', rules.group_size * estimate)
  return d
end
local REQUEUED = {failed = true, timeout = true, lag = true}
local function requeue(g, reason)  -- the task of a dropped group again, in the slot that it leaves; nil when it is not worth it
  if not REQUEUED[reason] or g.q >= rules.max_requeues or get('numbered') >= rules.steps then return end
  local d = make_draw(g.e, g.x, g.q + 1)
  for i = 0, rules.group_size - 1 do enqueue('open', member(d, i), rank(d, i)) end
  return d
end
local function drop(d, reason)
  local g, tokens, cause = group(d), 0, nil
  for i, sample in ipairs(samples(g)) do
    if not TERMINAL[sample.st] then close(d, i - 1, sample, reason) end
    if sample.info ~= '' then tokens = tokens + (select(3, unpacked(BODY, sample.info))) end  -- generated
  end
  if g.st == 'open' then call('ZREM', K.unfinished, d) end
  move_group(g, 'dropped')
  if g.rid ~= '' then call('XDEL', K.ready, g.rid) end
  free(d)
  add('dropped', 1)
  local again = requeue(g, reason)
  add('x:' .. (again and 'requeued' or reason), 1)
  if again then cause = reason; reason = 'requeued as ' .. again end
  call('RPUSH', K.drops, cjson.encode({d, reason}))
  log('dead', {draw = d, reason = reason, environment = g.e, generated_tokens = tokens, cause = cause})
  wake.samples = true; wake.ready = true
end
local function settle(d)  -- nothing when it is finished already
  local g, closed, late, steps, seen, reward, signal = group(d), false, false, {}, {}, nil, false
  if not g or g.st ~= 'open' then return end
  for i = 1, g.at and g.n or 0 do
    if not TERMINAL[state_of(g, i)] then return end
  end
  for _, sample in ipairs(samples(g)) do
    if not TERMINAL[sample.st] then return end
    closed = closed or sample.st == 'closed'
    late = late or sample.ended == 'timeout'
  end
  for _, sample in ipairs(g.s) do
    local own = steps_of(sample)
    if sample.st == 'scored' then
      signal = signal or reward ~= nil and sample.ended ~= reward
      reward = sample.ended
      if not seen[own] then seen[own] = true; steps[#steps + 1] = own end
    end
  end
  if #steps == 0 then return drop(d, late and 'timeout' or 'failed') end
  move_group(g, closed and 'short' or 'complete')
  g.quiet = signal and 0 or 1
  call('ZREM', K.unfinished, d)
  if not signal and get('resampled') < rules.resample_no_signal then
    add('resampled', 1)
    return drop(d, 'no_signal')
  end
  g.rid = call('XADD', K.ready, '*', 'draw', d, 'environment', g.e, 'steps', table.concat(steps))
  if rules.pinned or get('g:complete') + get('g:short') >= rules.groups_per_batch then wake.ready = true end
end
local function settle_all(draws)  -- in their order, so that the order in which their samples came does not matter
  table.sort(draws)
  for n, d in ipairs(draws) do
    if d ~= draws[n - 1] then settle(d) end
  end
end
local function fail(d, i, sample, reason, ended)  -- settle(d) has to follow
  close(d, i, sample, ended or 'failed')
  touch(d)
  log('dead', {draw = d, index = i, reason = reason})
end

-- lookups
local LEASES = '<I8I4I4I4I4'  -- draw, first sample, how many, attempt, epoch: leases that only their sample tells apart
local function read_leases()  -- those that a request is about
  local list, draws, rows, position = {}, {}, ARGV[4], 1
  while position <= #rows do
    local run = {unpacked(LEASES, rows, position)}
    position = run[6]
    if run[4] < 1 then run[5] = math.huge end  -- no attempt is below 1: nobody was ever granted this
    list[#list + 1] = run
    draws[#list] = run[1]
    for i = run[2], run[2] + run[3] - 1 do want(run[1], i) end
  end
  preload(draws)
  return list
end
local function find(d, i, epoch)
  local g = epoch == meta.epoch and group(d)
  return g and sample_of(g, d, i + 1) or nil
end
local function absent(d, epoch)  -- outcome for a lease without a record
  if epoch < meta.epoch then return 'outdated' end
  if epoch == meta.epoch and d < get('next_draw') and not group(d) then return 'outdated' end
  return 'unknown'
end
local function effective(step, incarnation)
  local fork
  for _, pair in ipairs(lineage) do
    if pair[1] > incarnation and (not fork or pair[2] < fork) then fork = pair[2] end
  end
  return (not fork or step <= fork) and step or 2 * fork - step
end
local function valid(v) return v.pub == 1 and v.del == 0 and effective(v.step, v.inc) == v.step end
local function bounds(steps)
  local oldest, newest
  for position = 1, #steps, 8 do
    local step = effective(unpacked(STEP, steps, position))
    oldest = min(oldest or step, step); newest = max(newest or step, step)
  end
  return oldest, newest
end
local oldest_of = {}  -- steps -> the oldest of them: most samples share theirs with many others
local function oldest_granted(g)  -- asked of every open group when a batch is numbered, so it unpacks without making records
  local oldest, raw, position = nil, g.raw, g.rest
  for i = 1, g.n do
    local st, holder, part, info, _
    if not g.s then st, _, _, holder, part, info, _, _, position = unpacked(SAMPLE, raw, position) end
    local sample = g.s and g.s[i] or g.some and g.some[i]
    if sample then st, holder, part, info = sample.st, sample.holder, sample.part, sample.info end
    local steps = ''
    if st == 'leased' or st == 'partial' then
      steps = sub(holder, 1, 8) .. sub(part, 5)
    elseif st ~= 'closed' then
      steps = sub(info, 25)
    end
    if steps ~= '' then
      local own = oldest_of[steps]
      if not own then
        own = bounds(steps)
        oldest_of[steps] = own
      end
      oldest = min(oldest or own, own)
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

-- Grants as an answer: groups = what is told of each draw once, and packed runs {position in groups, first sample, how many,
-- attempt} of what was granted one after the other.
local grants = {groups = {}, runs = {}, places = {}, count = 0}
local function list_grant(d, i, attempt, g, ...)
  local place, run = grants.places[d], grants.runs[#grants.runs]
  if not place then
    place = #grants.groups + 1
    grants.places[d] = place
    grants.groups[place] = {d, g.e, g.x, ...}
  end
  if run and run[1] == place and run[2] + run[3] == i and run[4] == attempt then
    run[3] = run[3] + 1
  else
    grants.runs[#grants.runs + 1] = {place, i, 1, attempt}
  end
  grants.count = grants.count + 1
end
local function granted() return grants.count end
local function grant_rows()
  local rows = {}
  for n, run in ipairs(grants.runs) do rows[n] = pack('<I4I4I4I4', unpack(run)) end
  return table.concat(rows)
end

-- budget
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
local function due() return string.format('%.0f', now >= get('grace') and now or 0) end
