-- All counters, who holds leases, and the lowest draw that is neither committed nor dropped, at one moment. Changes nothing.
local low = get('next_draw')
for _, d in ipairs(call('HKEYS', K.groups)) do low = min(low, tonumber(d)) end
local function count(queue, field)
  local members, draws, held = call('ZRANGE', K[queue], 0, -1), {}, {}
  for i, member in ipairs(members) do draws[i] = split(member) end
  preload(draws)
  for _, member in ipairs(members) do
    local d, i = split(member)
    local sample = group(d) and group(d).s[i + 1]
    local worker = sample and sample[field] or '?'
    held[worker] = (held[worker] or 0) + 1
  end
  return held
end
meta.lineage = nil
return finish({
  meta = meta, ready = call('XLEN', K.ready), low = low, sample = count('leases', 'w'), scoring = count('scoring', 'sw')})
