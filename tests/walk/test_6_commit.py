"""Hop 6: a checkpoint covers batch k, and the ledger may forget it."""

from __future__ import annotations

import pytest

from services.buffer.ledger import Balance
from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from slipstream.errors import Fenced, OutOfRange
from tests.walk.hops import Walk, commit, publish, read_batch, up_to_batch


async def opened(walk: Walk) -> Checkpoints:
    """The run's checkpoints, with this trainer in charge of them."""
    checkpoints = Checkpoints(walk.store, walk.run.run.name, keep=2)
    await checkpoints.open()
    await checkpoints.take_over(walk.buffer.incarnation)
    return checkpoints


def groups(balance: Balance) -> dict[str, int]:
    """How many groups are in which state."""
    return {state: count for state, count in balance.groups.items() if count}


async def test_first_the_checkpoint_then_the_commit(walk: Walk) -> None:
    """Until the commit the ledger keeps what batch 1 was made of; after it the rows are gone, and only the batch log remembers.
    The checkpoint was read back before: nothing is forgotten that could be needed again."""
    ledger, checkpoints = walk.buffer.front.ledger, await opened(walk)
    batch = await up_to_batch(walk, 1)
    walk.learner.step(batch.groups, 1)
    assert groups(await ledger.balance()) == {"batched": 4, "complete": 4}
    header = await commit(walk, checkpoints, batch)
    assert checkpoints.pointer.name == header.name and checkpoints.pointer.step == 1
    balance = await ledger.balance()
    assert groups(balance) == {"committed": 4, "complete": 4}
    balance.check(group_size=4)
    with pytest.raises(OutOfRange, match="batch 1 must be above the committed 1"):
        await walk.buffer.batch(1)
    assert len(await walk.buffer.read(1)) == 16


async def test_the_next_trainer_goes_on_where_the_checkpoint_is(walk: Walk) -> None:
    """A trainer dies in the middle of step 2. Its successor has the weights and moments of step 1 bit for bit, a higher
    incarnation, and gets batch 2 again as it was; should the old one wake up, it is told to stop."""
    checkpoints, batch = await opened(walk), await up_to_batch(walk, 1)
    walk.learner.step(batch.groups, 1)
    await publish(walk, 1)
    header = await commit(walk, checkpoints, batch)
    lost = await read_batch(walk, 2)
    metrics = walk.learner.step(lost.groups, 2)

    successor = Checkpoints(walk.store, walk.run.run.name, keep=2)
    pointer = await successor.open()
    loaded = await successor.load()
    assert loaded is not None and loaded[0] == header
    taken = await walk.buffer.take_incarnation(above=pointer.incarnation, checkpoint_batch=loaded[0].step)
    await successor.take_over(taken.incarnation)
    assert (taken.incarnation, taken.numbered_batch, taken.committed_batch) == (2, 2, 1)
    learner = Learner(walk.run)
    learner.load(loaded[1])
    again = await read_batch(walk, 2)
    assert again.audit == lost.audit and learner.step(again.groups, 2) == metrics
    for ours, theirs in zip(learner.weights(), walk.learner.weights(), strict=True):
        assert bytes(ours.data) == bytes(theirs.data), ours.name

    with pytest.raises(Fenced, match="incarnation 2 has taken over from 1"):
        await checkpoints.save(walk.learner.snapshot(), step=2, incarnation=1, ledger_sequence=0)
    walk.buffer.incarnation = 1
    with pytest.raises(Fenced, match="another trainer has taken over; stop"):
        await walk.buffer.commit(2)
