-- request: above, checkpoint, epoch and sequence of the checkpoint
local numbered, committed = get('numbered'), get('committed')
local epoch, sequence = get('epoch'), get('sequence')
if request.checkpoint > numbered or epoch < request.epoch or (epoch == request.epoch and sequence < request.sequence) then
  return refuse('behind', {checkpoint = request.checkpoint, numbered = numbered, epoch = epoch, sequence = sequence})
end
if request.checkpoint < committed then
  return refuse('fork', {checkpoint = request.checkpoint, committed = committed, run = rules.run})
end
commit(request.checkpoint)
local incarnation = max(get('incarnation'), request.above) + 1
set('incarnation', incarnation)
lineage[#lineage + 1] = {incarnation, request.checkpoint}
set('lineage', cjson.encode(lineage))
set('published', min(get('published'), request.checkpoint))
for number, v in pairs(versions()) do
  if v.pub == 0 then call('HDEL', K.versions, number) end  -- its writer is fenced: it can never be published
end
add('sequence', 1)
log('events', {event = 'incarnation', incarnation = incarnation, checkpoint = request.checkpoint})
wake.samples = true; wake.versions = true; wake.ready = true
return finish({incarnation, get('epoch'), get('numbered'), get('committed'), get('sequence')})
