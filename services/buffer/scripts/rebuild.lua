-- Start over behind a lost ledger. request: the fields of `Rebuilt`; versions as {number, step, incarnation, key, crc}
if meta.epoch ~= request.seen_epoch then return finish(false) end
local kept = {schema = 1, estimate = 1, grace = 1, incarnation = 1, lineage = 1}
local function keeps(name) return kept[name] or string.find(name, '.', 1, true) or string.find(name, '^e[sg]:') end
local epoch, sequence, lost = max(meta.epoch, request.epoch) + 1, max(get('sequence'), request.sequence) + 1, #request.lost_draws
for _, name in ipairs(NAMES) do
  if name ~= 'events' and name ~= 'dead' then call('DEL', K[name]) end
end
for name in pairs(meta) do
  if keeps(name) then changed[name] = true else meta[name] = nil end
end
set('epoch', epoch); set('sequence', sequence); set('published', -1); set('version', request.version)
set('numbered', request.numbered); set('committed', request.committed); set('next_draw', request.next_draw)
set('dropped', request.next_draw - request.numbered * rules.groups_per_batch); set('lost', request.next_draw - lost)
set('g:dropped', lost); set('s:closed', lost * rules.group_size); set('x:ledger lost', lost)
for name, count in pairs(request.cursor) do call('HSET', K.cursor, name, count) end
for _, v in ipairs(request.versions) do
  save_version(v[1], {step = v[2], inc = v[3], key = v[4], crc = v[5], pub = 1, del = 0})
end
for _, d in ipairs(request.lost_draws) do log('dead', {draw = d, reason = 'ledger lost', epoch = epoch - 1}) end
log('events', {event = 'rebuilt', epoch = epoch, numbered = request.numbered, next_draw = request.next_draw})
return finish(true)
