"""Hop 1: a rollout worker asks for work. The buffer draws tasks, and lends out one sample at a time of each.

Read the files of this folder in the order of their numbers, with `hops.py` beside them: together they are one sample's way
through the house, from a lease to the weights that it changed.
"""

from __future__ import annotations

from slipstream import rpc, seeds
from slipstream.protos.buffer.v1 import samples_pb2
from tests.walk.hops import Walk, lease


async def test_a_lease_is_one_sample_of_one_draw(walk: Walk) -> None:
    """Taking a task is a draw, and a draw is a group of samples to be compared. Everything random about a sample follows from
    its (draw, index), so whoever gets it, and however often, starts from the same seed."""
    leases = await lease(walk)
    samples = [(s.lease.sample.draw.number, s.lease.sample.index) for s in leases]
    assert samples == [(draw, index) for draw in range(8) for index in range(4)]
    for s in leases:
        draw, index = s.lease.sample.draw.number, s.lease.sample.index
        assert s.seed == seeds.sample_seed(0, draw, index)
        assert s.task.environment == "sort-digits" and s.task.seed == seeds.task_seed(0, "sort-digits", draw)
        assert (s.group_size, s.lease.attempt) == (4, 1)
    assert len({s.task.index for s in leases}) == 8 and len({s.seed for s in leases}) == 32


async def test_the_budget_is_what_bounds_the_lag(walk: Walk) -> None:
    """Not more than (max_lag + 1) batches are under way. Whoever asks for more is told, in words, what everybody waits for;
    a worker that has nothing to do is how the trainer's pace reaches the rollouts."""
    assert len(await lease(walk)) == (1 + 1) * 4 * 4
    answer = await walk.buffer.lease(wait_s=0)
    assert not answer.leases and not answer.finished
    assert answer.waiting_for == (
        "the policy version of step 1: 8 draws are outstanding, at most (max_lag + 1) * groups_per_batch = 8 may be; "
        "32 samples are leased to others")


async def test_a_lease_given_back_is_granted_again_with_the_next_attempt(walk: Walk) -> None:
    """A worker that stops gives its leases back; the leases of one that dies lapse. Either way another worker gets the sample,
    and the attempt number tells the two apart, should the first one come back from the dead."""
    first, *_ = await lease(walk)
    await rpc.call(walk.buffer.samples.ReleaseSamples, samples_pb2.ReleaseSamplesRequest(leases=[first.lease]), 5)
    [second] = await lease(walk)
    assert second.lease.sample == first.lease.sample and second.seed == first.seed
    assert (first.lease.attempt, second.lease.attempt) == (1, 2)
