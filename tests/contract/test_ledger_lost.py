"""A ledger that was lost, emptied under live fronts, or rewound: said by name, rebuilt once, fenced against what was before."""

from __future__ import annotations

import dataclasses

import pytest

from services.buffer.connection import connect
from services.buffer.ledger import Ledger, Outcome, Rebuilt, Version
from services.buffer.memory_state import MemoryState
from slipstream.errors import Fenced, OutOfRange, Unavailable
from tests.contract.ledger_bench import Bench, batch_draws, draws, finish, grant, submit

PLAN = Rebuilt(
    seen_epoch=1, numbered=2, committed=1, next_draw=6, version=3, cursor={"sort": 6}, epoch=4, sequence=700,
    versions=[Version(2, 1, 1, "versions/2", 7)], lost_draws=[4, 5])


async def empty(bench: Bench, ledger: Ledger) -> None:
    """Everything of the store is gone; the fronts are not."""
    if bench.model:
        bench.model._state = MemoryState(ledger.rules, lambda: bench.now)
        return
    client = connect(bench.admin_url)
    await client.flushall()
    await client.aclose()


async def test_a_trainer_that_knows_more_finds_the_ledger_behind(bench: Bench) -> None:
    """By batch, by epoch, by sequence number of the checkpoint, by its own incarnation, and by a batch out of reach."""
    ledger = await bench.start()
    sequence = (await ledger.balance()).meta["sequence"]
    assert (await ledger.take_incarnation(1, 0, 1, sequence)).incarnation == 2
    sequence += 1
    for call in (
            ledger.take_incarnation(2, 1), ledger.take_incarnation(2, 0, 2, 0), ledger.take_incarnation(2, 0, 1, sequence + 1),
            ledger.commit(3, 0), ledger.number_batch(2, 2)):
        with pytest.raises(Fenced) as caught:
            await call
        assert caught.value.reason == "LEDGER_BEHIND"
    assert (await ledger.take_incarnation(2, 0, 0, 10**9)).incarnation == 3  # a checkpoint of a former epoch


async def test_an_emptied_ledger_says_so_and_is_rebuilt(bench: Bench) -> None:
    """The first call opens it anew. The rebuilt one is above the epoch and the sequence of the checkpoint."""
    ledger = await bench.start()
    grants = await grant(ledger)
    await empty(bench, ledger)
    with pytest.raises(Unavailable) as caught:
        await ledger.heartbeat_samples([grants[0].lease])
    assert caught.value.reason == "LEDGER_EMPTY" and caught.value.retry_s
    assert await ledger.heartbeat_samples([grants[0].lease]) == [Outcome.UNKNOWN]
    await ledger.rebuild(PLAN)
    await ledger.rebuild(dataclasses.replace(PLAN, next_draw=99))  # another front, a moment later: no longer epoch 1
    taken = await ledger.take_incarnation(7, 1, 4, 700)
    assert (taken.incarnation, taken.ledger_epoch, taken.numbered_batch, taken.committed_batch) == (8, 5, 2, 1)
    assert taken.ledger_sequence > 700
    balance = await ledger.balance()
    balance.check(2)
    assert (balance.dropped, balance.meta["next_draw"]) == ({"ledger lost": 2}, 6)
    assert [line["draw"] for line in await ledger.archive() if line.get("reason") == "ledger lost"] == [4, 5]
    assert await ledger.submit_samples([submit(grants[0])]) == [Outcome.OUTDATED]


async def test_a_rebuilt_ledger_goes_on(bench: Bench) -> None:
    """Batches of the log are numbered but not here; they can be committed; versions of the store serve; draws go on."""
    ledger = await bench.start()
    await ledger.rebuild(PLAN)
    bench.incarnation = (await ledger.take_incarnation(0, 1)).incarnation
    assert [v.number for v in await ledger.versions()] == [2]
    numbering = await ledger.number_batch(bench.incarnation, 2)
    assert (numbering.numbered, numbering.sequence) == (True, 0)
    with pytest.raises(OutOfRange):
        await ledger.read_batch(2)
    await bench.publish(ledger, 1)
    await bench.publish(ledger, 2)
    assert await ledger.commit(bench.incarnation, 2) == 2
    grants = await grant(ledger)
    assert draws(grants) == [6, 7, 8, 9] and {g.lease.epoch for g in grants} == {5}
    await finish(ledger, grants, 2, bench.incarnation)
    assert (await ledger.number_batch(bench.incarnation, 3)).numbered
    assert await batch_draws(ledger, 3) == [6, 7]


async def test_a_batch_tells_what_was_alive_when_it_was_numbered(bench: Bench) -> None:
    """Sequence, time, next draw and the draws without an end: what a rebuild starts from. The same at every call."""
    ledger = await bench.start()
    grants = await grant(ledger)
    await finish(ledger, [g for g in grants if g.lease.draw in (0, 2, 3)])
    first = await ledger.number_batch(1, 1)
    again, composition = await ledger.number_batch(1, 1), await ledger.read_batch(1)
    assert first == again and first.sequence == composition.ledger_sequence
    assert (first.numbered_ms, composition.numbered_ms) == (bench.now, bench.now)
    assert ([g.draw for g in composition.groups], list(composition.live), composition.next_draw) == ([0, 2], [1, 3], 4)
