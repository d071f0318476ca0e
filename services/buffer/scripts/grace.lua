-- After an outage, no lease expires for one lease period.
set('grace', now + max(rules.lease_ms, rules.scoring_lease_ms))
return finish(true)
