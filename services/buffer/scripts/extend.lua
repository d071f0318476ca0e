-- Heartbeat or release. request: queue ('leases' | 'scoring'), field ('a' | 'sa'), ms (-1 = give back now), leases
preload_leases(request.leases)
local outcomes = {}
local deadline = request.ms < 0 and '0' or string.format('%.0f', now + request.ms)
for n, lease in ipairs(request.leases) do
  local sample, member = find(lease), lease[1] .. ':' .. lease[2]
  if not sample then
    outcomes[n] = absent(lease)
  elseif lease[3] > sample[request.field] then
    outcomes[n] = 'unknown'
  else
    local old = lease[3] == sample[request.field] and call('ZSCORE', K[request.queue], member)
    if not old or (request.ms >= 0 and tonumber(old) == 0) then
      outcomes[n] = 'fenced'
    else
      call('ZADD', K[request.queue], deadline, member)
      outcomes[n] = 'accepted'
    end
  end
end
if request.ms < 0 then wake.samples = true end
return finish(outcomes)
