-- Hop 6. request: incarnation, through
local fenced = fence(request.incarnation)
if fenced then return fenced end
if request.through > get('numbered') then return out_of_range(request.through) end
commit(request.through)
return finish(get('committed'))
