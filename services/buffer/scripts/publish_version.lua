-- Hop 5. request: number, step, incarnation, key, crc, next_step = of the version to reserve a number for, or 0.
-- Result: deletable = rows of versions, each in two answers; versions = rows of those that may be loaded, newest first; next_number.
local fenced = fence(request.incarnation)
if fenced then return fenced end
local record = versions()[request.number]
if not record or record.inc ~= request.incarnation or record.step ~= request.step then
  return refuse('unreserved', {number = request.number, step = request.step, incarnation = request.incarnation})
end
if record.pub == 0 then
  record.pub = 1; record.key = request.key; record.crc = request.crc
  save_version(request.number, record)
  set('published', max(get('published'), request.step))
  log('events', {event = 'version', number = request.number, step = request.step})
  wake.versions = true; wake.samples = true
end
local numbers, newest, held = {}, {}, {}
for number in pairs(versions()) do numbers[#numbers + 1] = number end
table.sort(numbers)
local kept = 0
for n = #numbers, 1, -1 do
  if kept < rules.keep_versions and valid(versions()[numbers[n]]) then newest[numbers[n]] = true; kept = kept + 1 end
end
for _, member in ipairs(call('ZRANGEBYSCORE', K.holds, string.format('(%.0f', now), '+inf')) do
  held[tonumber(string.match(member, '^(%d+):'))] = true
end
local needed = math.huge  -- pinned: versions that open draws name, or the next one will
if rules.pinned then
  needed = max(0, floor(get('next_draw') / rules.groups_per_batch) - rules.max_lag)
  local first = call('ZRANGE', K.unfinished, 0, 0)[1]
  if first then needed = min(needed, group(tonumber(first)).p) end
end
local deletable = {}
for _, number in ipairs(numbers) do
  local v = versions()[number]
  if v.del == 1 then
    deletable[#deletable + 1] = version_row(number, v)
    call('HDEL', K.versions, number)
  elseif v.pub == 1 and not newest[number] and not held[number] and not (valid(v) and v.step >= needed) then
    deletable[#deletable + 1] = version_row(number, v)
    v.del = 1
    save_version(number, v)
  end
end
return finish({deletable = deletable, versions = loadable(),
  next_number = request.next_step > 0 and reserve(request.incarnation, request.next_step) or 0})
