"""What a ledger promises to those who roll out and score, one promise a test, on every implementation and server."""

from __future__ import annotations

import dataclasses

import pytest

from services.buffer.ledger import Outcome, Partial, Scored
from slipstream.errors import ConfigError
from tests.contract.ledger_bench import Bench, draws, finish, grant, submit


async def test_draws_stop_at_the_budget_and_go_on_with_published_steps(bench: Bench) -> None:
    """At most (max_lag + 1) * B draws are outstanding; a numbered batch frees nothing, its published step does."""
    ledger = await bench.start()
    first = await grant(ledger)
    assert draws(first) == [0, 1, 2, 3]
    assert [g.min_step for g in first] == [0] * 8
    more = await ledger.grant_samples("w", 1)
    assert more.waiting is not None and more.waiting.why == "budget"
    await finish(ledger, first[:4])
    assert (await ledger.number_batch(1, 1)).numbered
    assert not await grant(ledger)
    await bench.publish(ledger, 1)
    second = await grant(ledger)
    assert draws(second) == [4, 5]
    assert [g.min_step for g in second] == [1] * 4  # draw 4 is for batch 3, whose tokens may be of step 1


async def test_nothing_is_drawn_before_the_first_version(bench: Bench) -> None:
    ledger = await bench.open()
    granted = await ledger.grant_samples("w", 1)
    assert granted.waiting is not None and granted.waiting.why == "first_version"


async def test_expiry_voids_nothing_until_somebody_else_is_granted(bench: Bench) -> None:
    """A slow worker still submits after its lease lapsed; once granted again, the older attempt is fenced."""
    ledger = await bench.start()
    slow, other = (await grant(ledger, 2, "slow"))
    bench.now += 1500
    assert await ledger.submit_samples([submit(slow)]) == [Outcome.ACCEPTED]
    again, = [g for g in await grant(ledger, 1, "fast") if g.lease.sample == other.lease.sample]
    assert again.lease == other.lease._replace(attempt=2)
    assert await ledger.submit_samples([submit(other)]) == [Outcome.FENCED]
    assert await ledger.heartbeat_samples([other.lease, again.lease]) == [Outcome.FENCED, Outcome.ACCEPTED]
    assert await ledger.submit_samples([submit(again)]) == [Outcome.ACCEPTED]


async def test_heartbeats_keep_and_release_gives_back(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0)
    grants = await grant(ledger)
    bench.now += 900
    assert await ledger.heartbeat_samples([grants[0].lease]) == [Outcome.ACCEPTED]
    bench.now += 900
    assert [g.lease.sample for g in await grant(ledger)] == [1]  # sample 0 was kept alive
    await ledger.release_samples([grants[0].lease])
    assert [g.lease for g in await grant(ledger)] == [grants[0].lease._replace(attempt=2)]


async def test_one_body_per_sample(bench: Bench) -> None:
    """The same attempt with the same checksum is fine again; another body is a conflict; nothing is stored twice."""
    ledger = await bench.start()
    one, = await grant(ledger, 1)
    assert await ledger.submit_samples([submit(one), submit(one)]) == [Outcome.ACCEPTED] * 2
    assert await ledger.submit_samples([submit(one, body=b"other")]) == [Outcome.CONFLICT]
    never = dataclasses.replace(one, lease=one.lease._replace(attempt=2))
    beyond = dataclasses.replace(one, lease=one.lease._replace(draw=99))
    assert await ledger.submit_samples([submit(never), submit(beyond)]) == [Outcome.UNKNOWN] * 2
    assert (await ledger.balance()).meta["bytes"] == len(b"body") + len(b"text")


async def test_a_partial_is_handed_to_the_next_attempt(bench: Bench) -> None:
    """What an attempt gave back unfinished comes with the next grant."""
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    one, = await grant(ledger)
    assert await ledger.submit_partials([Partial(one.lease, b"half", [(0, 1)], release=True)]) == [Outcome.ACCEPTED]
    again, = await grant(ledger)
    assert (again.partial, again.lease.attempt) == (b"half", 2)
    await finish(ledger, [again])
    assert (await ledger.balance()).meta["reserved"] == 0


async def test_scoring_has_its_own_leases(bench: Bench) -> None:
    """Unscored samples are granted in order of arrival, again after expiry; an older attempt's score is refused."""
    ledger = await bench.start()
    grants = await grant(ledger, 4)
    await ledger.submit_samples([submit(g, transcript=b"%d" % n) for n, g in enumerate(grants)])
    first = await ledger.grant_scoring("r", 3)
    assert [s.transcript for s in first] == [b"0", b"1", b"2"]
    bench.now += 1500
    again = await ledger.grant_scoring("r", 9)
    assert sorted(s.transcript for s in again) == [b"0", b"1", b"2", b"3"]
    assert await ledger.submit_scores([Scored(first[0].lease, b"1")]) == [Outcome.FENCED]
    assert await ledger.submit_scores([Scored(s.lease, b"1") for s in again]) == [Outcome.ACCEPTED] * 4
    assert await ledger.submit_scores([Scored(s.lease, b"1") for s in again]) == [Outcome.ACCEPTED] * 4
    assert (await ledger.balance()).groups["complete"] == 2


async def test_failed_samples_make_a_group_short_or_drop_it(bench: Bench) -> None:
    """An environment's failure closes the sample; a group without any scored sample is dropped(failed) and drawn anew."""
    ledger = await bench.start(groups_per_batch=1, max_lag=0)
    a, b = await grant(ledger)
    await ledger.submit_samples([submit(a, failure="reset: 500")])
    await finish(ledger, [b])
    assert (await ledger.balance()).groups["short"] == 1
    assert (await ledger.number_batch(1, 1)).numbered
    assert [len(g.members) for g in (await ledger.read_batch(1)).groups] == [1]
    await bench.publish(ledger, 1)
    await ledger.submit_samples([submit(g, failure="reset: 500") for g in await grant(ledger)])
    balance = await ledger.balance()
    assert balance.dropped == {"failed": 1}
    balance.check(2)
    assert draws(await grant(ledger)) == [2]
    assert await ledger.submit_samples([submit(a, 1)]) == [Outcome.OUTDATED]
    assert [line["reason"] for line in await ledger.archive() if line["log"] == "dead"] == ["reset: 500"] * 3 + ["failed"]


async def test_too_many_attempts_close_a_sample(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    for attempt in (1, 2, 3):
        assert [g.lease.attempt for g in await grant(ledger)] == [attempt]
        bench.now += 1500
    assert draws(await grant(ledger)) == [1]
    assert (await ledger.balance()).dropped == {"failed": 1}


async def test_a_group_over_its_deadline_is_dropped_by_name(bench: Bench) -> None:
    ledger = await bench.start(group_timeout_ms=5000)
    grants = await grant(ledger)
    bench.now += 5001
    await ledger.sweep()
    assert (await ledger.balance()).dropped == {"timeout": 4}
    assert await ledger.submit_samples([submit(grants[0])]) == [Outcome.OUTDATED]
    assert draws(await grant(ledger)) == [4, 5, 6, 7]


async def test_a_run_keeps_its_shape(bench: Bench) -> None:
    """Another batch size would renumber all draws: refused at start, naming the field."""
    await bench.start()
    with pytest.raises(ConfigError, match="groups_per_batch"):
        await bench.open(groups_per_batch=3)


async def test_no_lease_expires_for_one_period_after_an_outage(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    one, = await grant(ledger)
    bench.now += 5000
    await ledger.grace()
    assert not await grant(ledger)
    assert await ledger.heartbeat_samples([one.lease]) == [Outcome.ACCEPTED]
