-- Result: rows of the versions that may be loaded, newest first.
local numbers, rows = {}, {}
for number, v in pairs(versions()) do
  if valid(v) then numbers[#numbers + 1] = number end
end
table.sort(numbers, function(a, b) return a > b end)
for n, number in ipairs(numbers) do rows[n] = version_row(number, versions()[number]) end
return finish(rows)
