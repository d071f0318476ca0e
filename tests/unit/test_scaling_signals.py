"""Signals for autoscalers: an empty buffer asks for the most work, a full one for none, the end of a run for what is left."""

from __future__ import annotations

from services.buffer.signals import wanted_samples
from tests.contract.ledger_bench import Bench, finish, grant


async def test_wanted_samples_follow_the_budget_not_the_workers() -> None:
    """2 groups of 2 a batch, max_lag 1: at most 8 samples may be in generation; what is done is wanted no more."""
    bench = Bench("memory", "")
    ledger = await bench.open(groups_per_batch=2, group_size=2, max_lag=1, steps=3)

    async def wanted() -> int:
        return wanted_samples(ledger.rules, await ledger.balance())

    assert await wanted() == 8  # before the first version too: engines load meanwhile
    await bench.start(groups_per_batch=2, group_size=2, max_lag=1, steps=3)
    assert await wanted() == 8
    first = await grant(ledger, 3)
    assert await wanted() == 8  # a lease takes nothing away, nor would a second worker
    rest = await grant(ledger)
    assert await wanted() == 8
    await finish(ledger, [*first, *rest])
    assert await wanted() == 0  # the buffer is full: rollouts are parked until the trainer publishes
    assert (await ledger.number_batch(1, 1)).numbered
    assert await wanted() == 0  # numbering alone makes no room
    await bench.publish(ledger, 1)
    assert await wanted() == 4
    await finish(ledger, await grant(ledger))
    assert await wanted() == 0
    assert (await ledger.number_batch(1, 2)).numbered
    await bench.publish(ledger, 2)
    assert await wanted() == 0  # all 6 draws of 3 steps are made
