-- Start over behind a lost ledger. request: numbered, committed, next_draw, version, cursor
if request.numbered <= get('numbered') then return finish(false) end
local kept = {schema = 1, estimate = 1, grace = 1, incarnation = 1}
local epoch, sequence = get('epoch') + 1, get('sequence')
for _, name in ipairs(NAMES) do call('DEL', K[name]) end
for name in pairs(stored) do
  if not (kept[name] or string.find(name, '.', 1, true)) then meta[name] = nil end
  stored[name] = nil  -- all are written again
end
set('epoch', epoch); set('published', -1); set('numbered', request.numbered); set('committed', request.committed)
set('next_draw', request.next_draw); set('lost', request.next_draw); set('sequence', sequence + 1); set('version', request.version)
set('dropped', request.next_draw - request.numbered * rules.groups_per_batch)
for name, count in pairs(request.cursor) do call('HSET', K.cursor, name, count) end
log('events', {event = 'rebuilt', epoch = epoch, numbered = request.numbered, next_draw = request.next_draw})
return finish(true)
