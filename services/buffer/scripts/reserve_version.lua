-- Hop 5. request: incarnation, step
local fenced = fence(request.incarnation)
if fenced then return fenced end
return finish(reserve(request.incarnation, request.step))
