-- Drop groups and close samples that are over their deadline; forget lapsed holds.
local group_ms, sample_ms = rules.group_timeout_ms, rules.sample_timeout_ms
local function close_late(d)
  local late = false
  for i, sample in ipairs(samples(group(d))) do
    if sample.a > 0 and not TERMINAL[sample.st] and unpacked(TIME, first_grant(sample)) + sample_ms <= now then
      fail(d, i - 1, sample, 'timeout', 'timeout')
      late = true
    end
  end
  if late then settle(d) end
end
if group_ms > 0 or sample_ms > 0 then
  local first = sample_ms > 0 and (group_ms == 0 or sample_ms < group_ms) and sample_ms or group_ms
  for _, d in ipairs(call('ZRANGE', K.unfinished, 0, -1)) do
    d = tonumber(d)
    local drawn = group(d).t
    if drawn + first > now then break end  -- drawn in order, so the first young one ends it
    if group_ms > 0 and drawn + group_ms <= now then drop(d, 'timeout') elseif sample_ms > 0 then close_late(d) end
  end
end
call('ZREMRANGEBYSCORE', K.holds, '-inf', string.format('%.0f', now))
return finish(true)
