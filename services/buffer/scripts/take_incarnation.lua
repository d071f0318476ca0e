-- request: above, checkpoint
local numbered, committed = get('numbered'), get('committed')
if request.checkpoint > numbered then return refuse('behind', {checkpoint = request.checkpoint, numbered = numbered}) end
if request.checkpoint < committed then return refuse('fork', {checkpoint = request.checkpoint, committed = committed}) end
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
