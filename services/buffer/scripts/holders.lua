-- All counters, the lowest draw that is neither committed nor dropped, and, if request.leases, who holds leases, at one moment.
-- Changes nothing.
local low = get('next_draw')
for _, d in ipairs(call('HKEYS', K.groups)) do low = min(low, tonumber(d)) end
local function count(queue, worker_of)
  if not request.leases then return {} end
  local names, draws, held = call('ZRANGE', K[queue], 0, -1), {}, {}
  for n, name in ipairs(names) do draws[n] = split(name) end
  preload(draws)
  for _, name in ipairs(names) do
    local d, i = split(name)
    local sample = group(d) and samples(group(d))[i + 1]
    local worker = sample and worker_of(sample) or '?'
    held[worker] = (held[worker] or 0) + 1
  end
  return held
end
meta.lineage = nil
return finish({
  meta = meta, ready = call('XLEN', K.ready), low = low, sample = count('leases', worker_of),
  scoring = count('scoring', function(sample) return sample.scorer end)})
