"""What a restart may not do: hang, forget, repeat, skip or run ahead. Buffer and trainer go and come back; Redis is real.

Each test is one report from another system, turned around: the number is that of docs/cases.md.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from services.buffer.front import to_lease
from slipstream import sample
from slipstream.protos.buffer.v1 import batches_pb2, samples_pb2
from tests.buffer_client import Client, buffer, finished, run_file
from tests.redis_server import RedisProcess


def drawn(leases: list[samples_pb2.SampleLease]) -> list[int]:
    """Draws of leases, each once, in order."""
    return sorted({lease.lease.sample.draw.number for lease in leases})


def trained(batch: batches_pb2.Batch) -> list[int]:
    return [group.draw.number for group in batch.groups]


async def resume(client: Client, checkpoint: int) -> None:
    """A trainer starts from a checkpoint, and publishes before it asks for anything."""
    await client.take_incarnation(checkpoint_batch=checkpoint)
    await client.publish(checkpoint)


async def hand_in(client: Client, leases: list[samples_pb2.SampleLease], step: int) -> None:
    """Finish these samples, and score them."""
    submits = [finished(lease, step) for lease in leases]
    for submit in submits:
        played = sample.decode(submit.body)
        [segment] = played.segments
        segment.spans = tuple(dataclasses.replace(span, incarnation=client.incarnation) for span in segment.spans)
        submit.body = sample.encode(played)
        submit.crc32c = sample.crc32c(submit.body)
    results = (await client.submit(*submits)).results
    assert {r.outcome for r in results} <= {samples_pb2.OUTCOME_ACCEPTED}
    await client.score_all()


async def test_a_full_buffer_does_not_hold_up_a_resume(redis: RedisProcess, tmp_path: Path) -> None:
    """12: the quota is used up by a batch without a checkpoint, and the trainer dies. Its successor gets that batch again at
    once, is told to checkpoint when the next has no room, and from there on every batch commits."""
    run = run_file(groups_per_batch=1, max_lag=1)
    run = run.model_copy(update={"buffer": run.buffer.model_copy(update={"quota_bytes": 450, "sample_bytes": 150})})
    async with buffer(redis, tmp_path / "objects", run) as client:
        await client.begin()
        for batch in (1, 2):
            await hand_in(client, list((await client.lease()).leases), batch - 1)
            await client.batch(batch)
            await client.publish(batch)
        full = await client.lease(wait_s=0)
        assert not full.leases and "buffer.quota_bytes" in full.waiting_for
    async with buffer(redis, tmp_path / "objects", run) as client:
        await resume(client, 0)
        assert [trained((await client.batch(batch, wait_s=0)).batch) for batch in (1, 2)] == [[0], [1]]
        for batch in (1, 2):
            await client.publish(batch)
        assert (await client.batch(3, wait_s=0)).checkpoint_now
        for batch in (3, 4, 5, 6):
            await client.commit(batch - 1)
            await hand_in(client, list((await client.lease()).leases), batch - 1)
            assert len((await client.batch(batch)).batch.groups) == 1
            await client.publish(batch)


async def test_no_task_is_skipped_and_none_comes_twice(redis: RedisProcess, tmp_path: Path) -> None:
    """13: in three epochs of ten tasks the buffer is replaced after every lease and the trainer after every other batch. Each
    task is trained three times; the long ones too, which are those that were in flight whenever something died."""
    tasks: Counter[int] = Counter()
    held: list[samples_pb2.SampleLease] = []
    for batch in range(1, 16):
        async with buffer(redis, tmp_path / "objects") as client:
            if batch == 1:
                await client.begin()
            elif batch % 2:
                await resume(client, batch - 1)
            else:
                client.incarnation = (batch + 1) // 2
            held += (await client.lease(3, wait_s=0)).leases
        async with buffer(redis, tmp_path / "objects") as client:
            client.incarnation = (batch + 1) // 2
            held += (await client.lease(wait_s=0)).leases
            slow = max(drawn(held)) if drawn(held)[-1] < 29 else -1  # its group stays in flight over the restart
            await hand_in(client, [lease for lease in held if lease.lease.sample.draw.number != slow], batch - 1)
            held = [lease for lease in held if lease.lease.sample.draw.number == slow]
            tasks.update(group.task.index for group in (await client.batch(batch)).batch.groups)
            await client.publish(batch)
            await client.commit(batch)
    assert tasks == dict.fromkeys(range(10), 3)


async def test_finished_groups_outlive_a_resume(redis: RedisProcess, tmp_path: Path) -> None:
    """14: four groups are scored, one batch took two of them, then everything restarts: the other two are the next batch."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted = await client.step(1)
        assert trained((await client.batch(1)).batch) == [0, 1]
        await client.publish(1)
        await client.commit(1)
    redis.kill()
    redis.start()
    async with buffer(redis, tmp_path / "objects") as client:
        await resume(client, 1)
        batch = (await client.batch(2, wait_s=0)).batch
        assert trained(batch) == [2, 3] and not batch.drops
        assert await client.read(2) == {key: body for key, body in submitted.items() if key[0] in (2, 3)}


async def test_a_resume_draws_nothing_on_top_of_what_is_under_way(redis: RedisProcess, tmp_path: Path) -> None:
    """15: the window of draws is full before the restart, and so it is after it: what a dead worker had is granted again, no
    prompt is drawn beside it."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        leases = list((await client.lease()).leases)
        assert drawn(leases) == [0, 1, 2, 3]
        await hand_in(client, leases[:3], 0)
    async with buffer(redis, tmp_path / "objects") as client:
        await resume(client, 0)
        assert not (await client.lease(wait_s=0)).leases
        await client.front.ledger.release_samples([to_lease(lease.lease) for lease in leases[3:]])
        again = list((await client.lease()).leases)
        assert [lease.lease.sample for lease in again] == [lease.lease.sample for lease in leases[3:]]
        assert not (await client.lease(wait_s=0)).leases
        await hand_in(client, again, 0)
        assert trained((await client.batch(1)).batch) == [0, 1]


async def test_lag_stays_bounded_over_a_recovery(redis: RedisProcess, tmp_path: Path) -> None:
    """16: a trainer published steps 1 and 2 without a checkpoint and died. Samples of its step 2 are as far from the new branch
    as a step -2 would be: they are dropped by name, not trained as if they were fresh. Its workers must have loaded its own
    steps, and only so many draws are made as these allow."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        for batch in (1, 2):
            await client.step(batch)
            await client.batch(batch)
            await client.publish(batch)
        dead = list((await client.lease()).leases)
        assert drawn(dead) == [6, 7] and {lease.min_step for lease in dead} == {2}
        await hand_in(client, dead, 2)
        await resume(client, 0)
        assert not (await client.lease(wait_s=0)).leases
        for batch in (1, 2):
            assert trained((await client.batch(batch, wait_s=0)).batch) == [2 * batch - 2, 2 * batch - 1]
            await client.publish(batch)
        assert not (await client.batch(3, wait_s=0)).HasField("batch")
        assert (await client.front.ledger.balance()).dropped == {"lag": 4}
        fresh = list((await client.lease()).leases)
        assert [(draw, {s.min_step for s in fresh if s.lease.sample.draw.number == draw}) for draw in drawn(fresh)] == [
            (8, {1}), (9, {1}), (10, {2}), (11, {2})]

