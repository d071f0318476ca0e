"""How draws end other than by being trained, each by name: deadlines, groups without signal, tasks that are drawn again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from services.buffer.ledger import Grant, Ledger, Outcome, Partial, Scored
from tests.contract.ledger_bench import Bench, draws, finish, grant, submit


def of(grants: Sequence[Grant], draw: int) -> list[Grant]:
    return [g for g in grants if g.lease.draw == draw]


async def rewarded(ledger: Ledger, grants: Sequence[Grant], *rewards: float) -> None:
    """Submit with these rewards from the environment."""
    submits = [submit(g, transcript=b"", score=b"s", reward=r) for g, r in zip(grants, rewards, strict=True)]
    assert set(await ledger.submit_samples(submits)) == {Outcome.ACCEPTED}


async def dead(ledger: Ledger) -> list[dict[str, Any]]:
    lines = [line for line in await ledger.archive() if line["log"] == "dead"]
    return [{k: v for k, v in line.items() if k not in ("id", "log")} for line in lines]


async def test_a_sample_over_its_deadline_leaves_its_group_short(bench: Bench) -> None:
    """The clock of a sample starts with its first grant, and a new attempt does not turn it back; scoring counts, too."""
    ledger = await bench.start(sample_timeout_ms=5000, groups_per_batch=1)
    grants = await grant(ledger, 3)
    await finish(ledger, of(grants, 0)[:1])
    await ledger.submit_samples([submit(g) for g in of(grants, 1)])
    await ledger.grant_scoring("r", 1)
    bench.now += 3000
    assert [g.lease.attempt for g in await grant(ledger)] == [2, 1]  # draw 0's straggler again, draw 1's other sample
    bench.now += 2000
    await ledger.sweep()
    balance = await ledger.balance()
    assert (balance.groups["short"], balance.groups["open"]) == (1, 1)  # the sample granted 2 s ago is not late
    assert await dead(ledger) == [
        {"draw": 0, "index": 1, "reason": "timeout"}, {"draw": 1, "index": 0, "reason": "timeout"}]
    assert (await ledger.number_batch(1, 1)).numbered
    assert [len(g.members) for g in (await ledger.read_batch(1)).groups] == [1]
    assert await ledger.submit_samples([submit(of(grants, 0)[1])]) == [Outcome.OUTDATED]


async def test_a_group_of_which_nothing_was_in_time_is_dropped(bench: Bench) -> None:
    ledger = await bench.start(sample_timeout_ms=5000, max_lag=0, groups_per_batch=1)
    await grant(ledger)
    bench.now += 5000
    await ledger.sweep()
    balance = await ledger.balance()
    assert balance.dropped == {"timeout": 1}
    balance.check(2)


async def test_a_dropped_group_is_requeued_as_another_draw(bench: Bench) -> None:
    """The same task in the slot that the old draw leaves, at most `max_requeues` times; the cursor is not moved by that."""
    ledger = await bench.start(max_requeues=1, max_lag=0, groups_per_batch=1)
    first = await grant(ledger)
    await ledger.submit_samples([submit(g, failure="reset: 500") for g in first])
    again = await grant(ledger)
    assert draws(again) == [1] and {g.task_index for g in again} == {g.task_index for g in first} == {0}
    assert await ledger.submit_samples([submit(first[0])]) == [Outcome.OUTDATED]
    await ledger.submit_samples([submit(g, failure="reset: 500") for g in again])
    other = await grant(ledger)
    assert draws(other) == [2] and {g.task_index for g in other} == {1}
    balance = await ledger.balance()
    assert balance.dropped == {"requeued": 1, "failed": 1}
    balance.check(2)
    assert [(line.get("reason"), line.get("cause")) for line in await dead(ledger) if "index" not in line] == [
        ("requeued as 1", "failed"), ("failed", None)]
    await finish(ledger, other)
    assert (await ledger.number_batch(1, 1)).numbered
    assert (await ledger.read_batch(1)).drops == [(0, "requeued as 1"), (1, "failed")]


async def test_groups_without_signal_are_in_the_batch_and_marked(bench: Bench) -> None:
    """By default they keep their place: the decision that they have no weight is written with the composition."""
    ledger = await bench.start()
    grants = await grant(ledger, 4)
    await rewarded(ledger, of(grants, 0), 0.5, 0.5)
    await rewarded(ledger, of(grants, 1), 0.25, 0.5)
    assert (await ledger.number_batch(1, 1)).numbered
    assert [(g.draw, g.no_signal) for g in (await ledger.read_batch(1)).groups] == [(0, True), (1, False)]


async def test_groups_without_signal_are_replaced_up_to_a_bound(bench: Bench) -> None:
    """With `resample_no_signal` = 1, one group for each batch is dropped by name and another task drawn; the next one stays."""
    ledger = await bench.start(resample_no_signal=1, groups_per_batch=1, max_lag=0)
    await rewarded(ledger, await grant(ledger), 0.5, 0.5)
    assert not (await ledger.number_batch(1, 1)).numbered
    second = await grant(ledger)
    assert draws(second) == [1] and {g.task_index for g in second} == {1}
    await ledger.submit_samples([submit(g) for g in second])
    scoring = await ledger.grant_scoring("r", 9)
    await ledger.submit_scores([Scored(s.lease, b"1", 1.0) for s in scoring])
    assert (await ledger.number_batch(1, 1)).numbered
    composition = await ledger.read_batch(1)
    assert [(g.draw, g.no_signal) for g in composition.groups] == [(1, True)] and composition.drops == [(0, "no_signal")]
    await bench.publish(ledger, 1)
    await rewarded(ledger, await grant(ledger), 0.5, 0.5)
    assert (await ledger.balance()).dropped == {"no_signal": 2}


async def test_archived_lines_are_trimmed_and_no_others(bench: Bench) -> None:
    """What came after the archive was read stays, also when the same lines are trimmed twice."""
    ledger = await bench.start(max_lag=0, groups_per_batch=1)
    await ledger.submit_samples([submit(g, failure="broke") for g in await grant(ledger)])
    lines = await ledger.archive()
    await ledger.submit_samples([submit(g, failure="broke") for g in await grant(ledger)])
    for _ in range(2):
        await ledger.trim(lines)
    assert [line["draw"] for line in await dead(ledger)] == [1, 1, 1]


async def test_leases_that_nobody_was_granted_do_nothing(bench: Bench) -> None:
    """No attempt is below 1: neither a body nor a score comes in by one."""
    ledger = await bench.start()
    one, = await grant(ledger, 1)
    nobody = [one.lease._replace(sample=1, attempt=0), one.lease._replace(attempt=0), one.lease._replace(sample=7)]
    unknown = [Outcome.UNKNOWN] * 3
    assert await ledger.submit_scores([Scored(lease, b"1") for lease in nobody]) == unknown
    assert await ledger.submit_samples([submit(dataclasses.replace(one, lease=lease)) for lease in nobody]) == unknown
    assert await ledger.submit_partials([Partial(lease, b"half", []) for lease in nobody]) == unknown
    assert await ledger.heartbeat_samples(nobody) == unknown
    assert {k: v for k, v in (await ledger.balance()).samples.items() if v} == {"open": 1, "leased": 1}
