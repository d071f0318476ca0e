"""With many open groups, a batch is numbered in several short calls, so that nobody waits long for one of them: each looks at a
few groups, and what it learned of one holds until that one changes. In however many calls, the decision is the same. On every
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from services.buffer.ledger import Grant, Ledger
from services.buffer.redis_ledger import RedisLedger
from slipstream.errors import Unavailable
from tests.contract.ledger_bench import Bench, batch_draws, finish, grant

RULES: dict[str, Any] = {"groups_per_batch": 1, "group_size": 1, "max_lag": 4}


def one_at_a_time(ledger: Ledger) -> Any:
    """The same, looking at one group in a call."""
    if isinstance(ledger, RedisLedger):
        ledger.groups_at_once = 1
    return ledger


async def four_open(bench: Bench) -> tuple[Any, Sequence[Grant]]:
    """Draws 0 to 3 run since step 0, draw 4 was batch 1, draw 5 is ready. All four must be in batches 3 to 5: one too many."""
    ledger = one_at_a_time(await bench.start(**RULES))
    open_ = await grant(ledger, 4)
    await finish(ledger, await grant(ledger, 1))
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await finish(ledger, await grant(ledger, 1), step=1)
    return ledger, open_


async def begin_again(ledger: Any, before: Grant, version: int) -> Grant:
    """The sample goes to a worker that has this version."""
    await ledger.release_samples([before.lease])
    (again,) = (await ledger.grant_samples("w", 1, loaded=version)).grants
    assert again.lease.draw == before.lease.draw
    return again


async def waits_for(ledger: Any, batch: int) -> list[int]:
    """Draw that numbering waits for, the batch that it must be in, groups that must be in batches up to that."""
    waiting = (await ledger.number_batch(1, batch)).waiting
    assert waiting is not None and waiting.why == "oldest"
    return [waiting.facts[name] for name in ("draw", "last", "left")]


async def test_a_call_looks_at_few_groups_and_at_none_that_is_known(bench: Bench) -> None:
    """Four open groups in calls of one; then nothing is new; then one has changed, and is young enough now."""
    ledger, open_ = await four_open(bench)
    fresh, names = one_at_a_time(await bench.open(**RULES)), []
    if isinstance(fresh, RedisLedger):
        fresh._observe = lambda name, seconds: names.append(name)
    for looks in (4, 0):
        names.clear()
        assert await waits_for(fresh, 2) == [0, 5, 4]
        assert (names.count("ages"), names.count("number_batch")) in ((0, 0), (looks, 2 if looks else 1))
    await begin_again(ledger, open_[0], version=2)
    names.clear()
    assert (await fresh.number_batch(1, 2)).numbered and await batch_draws(fresh, 2) == [5]
    assert names.count("number_batch") <= 1 and "ages" not in names


async def test_what_another_front_changed_is_looked_at_again(bench: Bench) -> None:
    """Draw 0 becomes younger, and older again, through a front of which the numbering one knows nothing."""
    ledger, open_ = await four_open(bench)
    other = one_at_a_time(await bench.open(**RULES))
    bench.now -= 2000  # as it was when the leases were granted
    assert await waits_for(other, 2) == [0, 5, 4]
    again = await begin_again(ledger, open_[0], version=2)
    assert (await other.number_batch(1, 2)).numbered
    await bench.publish(ledger, 2)
    await begin_again(ledger, again, version=1)
    await finish(ledger, await grant(ledger, 1), step=2)
    assert await waits_for(other, 3) == [0, 5, 4]


async def test_a_front_that_dies_between_two_calls_leaves_nothing_undone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is as before, and the next front numbers the batch."""
    first, open_ = await four_open(bench)
    await begin_again(first, open_[0], version=2)
    ledger = one_at_a_time(await bench.open(**RULES))
    if isinstance(ledger, RedisLedger):
        before, run, calls = await ledger.balance(), ledger._run, []

        async def dies(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3:
                raise Unavailable("dead", "REDIS")
            return await run(*arguments, **named)

        monkeypatch.setattr(ledger, "_run", dies)
        with pytest.raises(Unavailable):
            await ledger.number_batch(1, 2)
        assert await ledger.balance() == before
    other = one_at_a_time(await bench.open(**RULES))
    assert (await other.number_batch(1, 2)).numbered and await batch_draws(other, 2) == [5]


async def test_a_batch_is_read_a_few_groups_at_a_time(bench: Bench) -> None:
    """Three groups of two in calls of one group: every member of every group, in order, each with its body and score."""
    ledger = one_at_a_time(await bench.start(groups_per_batch=3))
    await finish(ledger, await grant(ledger, 6))
    assert (await ledger.number_batch(1, 1)).numbered
    read = await ledger.read_batch(1)
    assert [(g.draw, [m.index for m in g.members]) for g in read.groups] == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])]
    assert {(m.body, m.score) for g in read.groups for m in g.members} == {(b"body", b"1")}
