-- Heartbeat or release. request: queue ('leases' | 'scoring'), field ('a' | 'sa'), ms (-1 = give back now)
local outcomes = {}
local deadline = request.ms < 0 and '0' or string.format('%.0f', now + request.ms)
local function extend(d, i, attempt, epoch)
  local sample, name = find(d, i, epoch), member(d, i)
  if not sample then return absent(d, epoch) end
  local newest = sample[request.field]
  if attempt > newest then return 'unknown' end
  local old = attempt == newest and call('ZSCORE', K[request.queue], name)
  if not old or (request.ms >= 0 and tonumber(old) == 0) then return 'fenced' end
  call('ZADD', K[request.queue], deadline, name)
  return 'accepted'
end
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  for i = first, first + count - 1 do outcomes[#outcomes + 1] = extend(d, i, attempt, epoch) end
end
if request.ms < 0 then wake.samples = true end
return finish(exceptions(outcomes))
