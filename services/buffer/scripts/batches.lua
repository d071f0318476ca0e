-- Shared by the scripts that the trainer's calls run.
local function fence(incarnation)
  local newest = get('incarnation')
  if incarnation ~= newest then return refuse('fenced', {given = incarnation, newest = newest}) end
end
local function out_of_range(batch)
  return refuse('range', {batch = batch, committed = get('committed'), numbered = get('numbered')})
end
local function commit(through, unfinished)  -- `unfinished`: another call follows, which writes the event
  if through <= get('committed') then return end
  for batch = get('committed') + 1, through do
    local raw = call('HGET', K.batches, batch)  -- none: known from the log alone, since the ledger was rebuilt
    local chosen, draws = raw and cjson.decode(raw).g or {}, {}
    for n, c in ipairs(chosen) do draws[n] = c[1] end
    preload(draws)
    for _, d in ipairs(draws) do
      move_group(groups[d], 'committed')
      free(d)
    end
    call('HDEL', K.batches, batch)
  end
  set('committed', through)
  if not unfinished then log('events', {event = 'commit', batch = through}) end
  wake.samples = true; wake.ready = true
end
local function version_row(number, v) return {number, v.step, v.inc, v.key, v.crc} end
local function save_version(number, v) call('HSET', K.versions, number, cjson.encode(v)) end
local function reserve(incarnation, step)  -- a number above all earlier ones
  add('version', 1)
  save_version(get('version'), {step = step, inc = incarnation, key = '', crc = 0, pub = 0, del = 0})
  return get('version')
end
local function loadable()  -- rows, newest first
  local numbers, rows = {}, {}
  for number, v in pairs(versions()) do
    if valid(v) then numbers[#numbers + 1] = number end
  end
  table.sort(numbers, function(a, b) return a > b end)
  for n, number in ipairs(numbers) do rows[n] = version_row(number, versions()[number]) end
  return rows
end
-- What a batch has to know of an open group: draw, digest of its record, oldest step. NEVER: it may get as old as it will.
local AGE, DIGEST_BYTES, NEVER = '<I8c16i8', 16, 2 ^ 52
local function digest(text) return sub(redis.sha1hex(text), 1, DIGEST_BYTES) end
local function age(g) return rules.over_lag[g.e] == 'wait' and oldest_granted(g) or NEVER end
