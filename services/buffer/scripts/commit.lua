-- Hop 6. request: incarnation, through, most = batches in one call, so that nobody waits long for this script
local fenced = fence(request.incarnation)
if fenced then return fenced end
if request.through > get('numbered') then return out_of_range(request.through) end
local target = min(request.through, get('committed') + request.most)
commit(target, target < request.through)
return finish(get('committed'))
