"""Hop 4: the trainer leases batch k by its number, reads its bodies and takes one step."""

from __future__ import annotations

import pytest

from services.trainer.packing import without_signal
from slipstream.sample import crc32c
from tests.walk.hops import Walk, lease, roll_out, score, up_to_batch


async def test_a_batch_is_composed_once(walk: Walk) -> None:
    """Batch 1 is the oldest complete groups, in the order of their draws. Its composition is durable before the first answer:
    asking again gives the same. The bodies are read apart from it, some or all, and are byte for byte what was handed in."""
    samples = await roll_out(walk, await lease(walk))
    await walk.buffer.submit(*samples)
    await score(walk)
    batch = (await walk.buffer.batch(1)).batch
    assert [(g.draw.number, len(g.members)) for g in batch.groups] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert (await walk.buffer.batch(1)).batch == batch
    bodies = await walk.buffer.read(1)
    assert bodies == {(s.lease.sample.draw.number, s.lease.sample.index): s.body for s in samples[:16]}
    for member in (m for g in batch.groups for m in g.members):
        body = bodies[member.sample.draw.number, member.sample.index]
        stored = await walk.store.get(member.body.key, member.body.offset, member.body.size)
        assert stored == body and member.body.crc32c == crc32c(body)
    assert await walk.buffer.read(1, batch.groups[1].members[2].sample) == {(1, 2): bodies[1, 2]}


async def test_a_batch_that_is_not_ready_names_what_it_waits_for(walk: Walk) -> None:
    """Nobody waits in silence: the answer says how much is missing and who has the oldest of it."""
    leases = await lease(walk)
    assert (await walk.buffer.batch(1, wait_s=0)).waiting_for == (
        "batch 1: 4 of 4 groups unfinished, oldest draw 0 leased by rollout-0")
    await walk.buffer.submit(*await roll_out(walk, leases))
    assert "waiting for a reward worker" in (await walk.buffer.batch(1, wait_s=0)).waiting_for


async def test_one_step_on_what_the_policy_itself_said(walk: Walk) -> None:
    """Sampler and trainer are two programs with one policy: on a fresh batch the trainer computes the log-probabilities that
    came with the tokens. Its step then makes what was right likelier, and the policy has moved away from its samples."""
    batch = await up_to_batch(walk, 1)
    assert without_signal(batch.groups) < 4
    metrics = walk.learner.step(batch.groups, 1)
    rewards = [m.reward for g in batch.groups for m in g.members]
    assert metrics["reward_mean"] == pytest.approx(sum(rewards) / 16) and 0 < sum(rewards) < 16
    assert metrics["lags"] == {"0": sum(m.sample.generated_tokens for g in batch.groups for m in g.members)}
    assert metrics["gap_max"] < 1e-4 and metrics["clip_share"] == 0
    again = walk.learner.step(batch.groups, 2)
    assert again["loss"] < metrics["loss"] and again["lag_max"] == 1 and again["gap_mean"] > 1e-3
