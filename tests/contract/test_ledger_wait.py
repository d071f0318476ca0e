"""What `over_lag = "wait"` promises: nobody's answer is left out because it was long. On every ledger.

A batch may take groups in any order as long as each still finds room before its tokens are too old. So it takes those with the
oldest tokens first, and is not numbered while it would leave more behind than the batches after it can hold.
"""

from __future__ import annotations

import pytest

from services.buffer.ledger import Partial
from tests.contract.ledger_bench import Bench, batch_draws, draws, finish, grant, submit


async def test_no_more_is_left_behind_than_the_next_batches_hold(bench: Bench) -> None:
    """Draws 0, 1 and 2 run since step 0 with max_lag 2, and a batch is one group: they must be batches 1 to 3. Batch 2 could be
    draw 3, but then two would be left for batch 3, and one of them would be dropped for being slow."""
    ledger = await bench.start(groups_per_batch=1, group_size=1, max_lag=2)
    zero, one, two = await grant(ledger)
    await finish(ledger, [one])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    three = await grant(ledger)
    assert draws(three) == [3]
    await finish(ledger, three, step=1)
    waiting = (await ledger.number_batch(1, 2)).waiting
    assert waiting is not None and waiting.why == "oldest"
    assert [waiting.facts[name] for name in ("draw", "last", "left")] == [0, 3, 2]
    await finish(ledger, [two])
    assert (await ledger.number_batch(1, 2)).numbered and await batch_draws(ledger, 2) == [2]
    await bench.publish(ledger, 2)
    waiting = (await ledger.number_batch(1, 3)).waiting
    assert waiting is not None and [waiting.facts[name] for name in ("draw", "last", "left")] == [0, 3, 1]
    await finish(ledger, [zero])
    for batch, draw in ((3, 0), (4, 3)):
        assert (await ledger.number_batch(1, batch)).numbered and await batch_draws(ledger, batch) == [draw]
    assert not (await ledger.balance()).dropped


async def test_oldest_tokens_go_first(bench: Bench) -> None:
    """Draw 0 was lost with its worker and begun again at step 1, so it can wait longer than draw 2, which is from step 0."""
    ledger = await bench.start(groups_per_batch=1, group_size=1, max_lag=2)
    _, one, two = await grant(ledger)
    await finish(ledger, [one])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    bench.now += 1500
    again = (await ledger.grant_samples("w", 1, loaded=2)).grants
    assert [(g.lease.draw, g.lease.attempt) for g in again] == [(0, 2)]
    await finish(ledger, again, step=1)
    await finish(ledger, [two])
    for batch, draw in ((2, 2), (3, 0)):
        assert (await ledger.number_batch(1, batch)).numbered and await batch_draws(ledger, batch) == [draw]


@pytest.mark.parametrize(("story", "waits"), [
    ("begun again", False), ("one begun again", True), ("begun again from a partial", True), ("one closed", False)])
async def test_the_oldest_token_of_an_open_group_decides(bench: Bench, story: str, waits: bool) -> None:
    """Draw 0 has two samples since step 0. Batch 2 waits for it while one of them is still of step 0, or goes on from tokens of
    step 0; a sample that was closed counts no more."""
    ledger = await bench.start(groups_per_batch=1, group_size=2, max_lag=1, max_attempts=2)
    zero, other, *one = await grant(ledger)
    await finish(ledger, one)
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await finish(ledger, (await ledger.grant_samples("w", 2, loaded=2)).grants, step=1)
    if story == "one closed":
        await ledger.submit_samples([submit(zero)])
        for granted in (1, 1, 0):
            assert len(await ledger.grant_scoring("r", 1)) == granted
            bench.now += 1500
        assert (await ledger.balance()).samples["closed"] == 1
    elif story == "begun again from a partial":
        await ledger.submit_partials([Partial(zero.lease, b"half", [(0, 1)], release=True)])
    elif story == "begun again":
        await ledger.release_samples([zero.lease])
    await ledger.release_samples([other.lease])
    again = (await ledger.grant_samples("w", 1 if story == "one begun again" else 2, loaded=2)).grants
    assert {g.lease.draw for g in again[:1]} == {0} and again[0].lease.attempt == 2
    numbering = await ledger.number_batch(1, 2)
    assert numbering.numbered is not waits
    if numbering.waiting:
        assert (numbering.waiting.why, numbering.waiting.facts["draw"]) == ("oldest", 0)
