-- Create or join the ledger of the run. request: schema, shape {name = number}
if #flat == 0 then
  set('schema', request.schema); set('epoch', 1); set('published', -1); set('estimate', rules.sample_bytes)
  for name, value in pairs(request.shape) do set(name, value) end
end
if meta.schema ~= request.schema then
  return refuse('schema', {found = meta.schema or '?', known = request.schema, run = rules.run})
end
for name, value in pairs(request.shape) do
  if meta[name] ~= value then
    return refuse('shape', {field = name, given = value, found = meta[name] or '?', run = rules.run})
  end
end
set('grace', now + max(rules.lease_ms, rules.scoring_lease_ms))
return finish(true)
