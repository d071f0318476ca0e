-- Drop groups over their deadline; forget lapsed holds.
if rules.group_timeout_ms > 0 then
  for _, d in ipairs(call('ZRANGE', K.unfinished, 0, -1)) do
    d = tonumber(d)
    if group(d).t + rules.group_timeout_ms > now then break end  -- drawn in order, so the first young one ends it
    drop(d, 'timeout')
  end
end
call('ZREMRANGEBYSCORE', K.holds, '-inf', string.format('%.0f', now))
return finish(true)
