-- Hop 2, unfinished. Of each lease: release 0 | 1, steps. Blobs: the bodies
local outcomes, n, position = {}, 0, 1
local function store(d, i, attempt, epoch, release, steps, body)
  local sample, g, name = find(d, i, epoch), group(d), member(d, i)
  if not sample then return absent(d, epoch) end
  if attempt > sample.a then return 'unknown' end
  if attempt == sample.a and sample.st == 'partial' then return 'accepted' end  -- a repeat: the lease was given back with it
  if attempt < sample.a or sample.st ~= 'leased' then return 'fenced' end
  put('partials', name, body)
  hold(g, #body - partial_size(sample))
  sample.part = pack('<I4', #body) .. steps
  touch(d)
  if release == 1 then
    dequeue('leases', name)
    move(sample, 'partial')
    enqueue('open', name, rank(d, i))
    wake.samples = true
  end
  return 'accepted'
end
for _, run in ipairs(read_leases()) do
  local d, first, count, attempt, epoch = unpack(run)
  for i = first, first + count - 1 do
    local release, steps, after = unpacked('<BI4c0', ARGV[5], position)
    position = after
    n = n + 1
    outcomes[n] = store(d, i, attempt, epoch, release, steps, ARGV[5 + n])
  end
end
return finish(exceptions(outcomes))
