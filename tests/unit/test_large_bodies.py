"""Bodies of any size reach the trainer: 13 MB ones with routes, and those for which the ledger's quota has no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from google.rpc import code_pb2

from slipstream import sample
from slipstream.config import RunFile, parse
from slipstream.protos.buffer.v1 import samples_pb2
from tests.buffer_client import Client, buffer
from tests.redis_server import RedisProcess


def run_of(**buffer: Any) -> RunFile:
    """Two groups of two samples a batch; everything of one batch may be outstanding."""
    return parse({
        "run": {"name": "large", "steps": 20}, "model": {"path": "m"}, "environments": [{"name": "sort", "entry": "m:C"}],
        "schedule": {"groups_per_batch": 2, "group_size": 2, "max_lag": 1}, "trainer": {"checkpoint_every": 1},
        "buffer": buffer})


def finished(lease: samples_pb2.SampleLease, tokens: int, step: int = 0, layers: int = 0) -> samples_pb2.SubmittedSample:
    """What a worker hands in, with its reward; with routes of `layers` layers and 8 experts a token."""
    rng = np.random.default_rng(lease.seed)
    segment = sample.Segment(
        rng.integers(0, 1000, tokens, dtype=np.int32), np.arange(tokens) >= 1, np.full(tokens - 1, -0.5, np.float32),
        (sample.Span(step + 1, step, 1, tokens - 1),),
        rng.integers(0, 128, (tokens - 1, layers, 8), dtype=np.uint8) if layers else None)
    body = sample.encode(sample.Sample([segment]))
    submitted = samples_pb2.SubmittedSample(
        lease=lease.lease, body=body, crc32c=sample.crc32c(body), tokens=tokens, generated_tokens=tokens - 1, oldest_step=step,
        newest_step=step)
    submitted.score.scalar = 1.0 + lease.lease.sample.index
    return submitted


async def hand_in(client: Client, *samples: samples_pb2.SubmittedSample) -> dict[tuple[int, int], bytes]:
    """Submit; the bodies by (draw, index)."""
    results = (await client.submit(*samples)).results
    assert [(r.status.code, r.outcome) for r in results] == [(code_pb2.OK, samples_pb2.OUTCOME_ACCEPTED)] * len(samples)
    return {(s.lease.sample.draw.number, s.lease.sample.index): s.body for s in samples}


async def test_32k_tokens_with_routes_flow_from_the_worker_to_the_trainer(redis: RedisProcess, tmp_path: Path) -> None:
    """12.9 MB a sample: through SubmitSamples, the ledger and the batch log to ReadBatch, byte by byte."""
    async with buffer(redis, tmp_path / "objects", run_of()) as client:
        await client.begin()
        one, *others = (await client.lease(4)).leases
        submitted = await hand_in(client, finished(one, 32_768, layers=48), *(finished(lease, 100) for lease in others))
        assert len(submitted[0, 0]) > 12_800_000
        assert (await client.batch(1)).HasField("batch")
        assert await client.read(1) == submitted
        decoded = sample.decode(submitted[0, 0]).segments[0]
        assert decoded.routes is not None and decoded.routes.shape == (32_767, 48, 8)


async def test_bodies_over_the_quota_spill_and_come_back(redis: RedisProcess, tmp_path: Path) -> None:
    """Nobody is refused: what has no room waits in the object store, is in its batch as any other, and goes with the commit."""
    spill = tmp_path / "objects" / "spill"
    async with buffer(redis, tmp_path / "objects", run_of(quota_bytes=20_000, sample_bytes=1000)) as client:
        assert client.front is not None
        await client.begin()
        leases = (await client.lease(4)).leases
        submitted = await hand_in(client, *(finished(lease, 1000) for lease in leases))  # 8 KB each: two have room
        assert len(list(spill.glob("*"))) == 2
        assert client.front.metrics.spilled._value.get() == 2
        held = (await client.front.ledger.balance()).meta["bytes"]
        assert 16_000 < held < 20_000
        assert (await client.submit(finished(leases[3], 1000))).results[0].outcome == samples_pb2.OUTCOME_ACCEPTED  # a repeat
        assert len(list(spill.glob("*"))) == 2
        assert (await client.batch(1)).HasField("batch")
        assert await client.read(1) == submitted
        await client.publish(1)
        assert await client.commit(1) == 1
        assert list(spill.glob("*")) == []
        balance = await client.front.ledger.balance()
        balance.check(2)
        assert balance.meta["bytes"] == 0


async def test_a_spilled_body_whose_group_was_dropped_is_deleted_too(redis: RedisProcess, tmp_path: Path) -> None:
    """Nothing stays in the object store for ever: not what a failed group left, nor what nobody came to know of."""
    spill = tmp_path / "objects" / "spill"
    async with buffer(redis, tmp_path / "objects", run_of(quota_bytes=20_000, sample_bytes=1000)) as client:
        await client.begin()
        leases = (await client.lease(4)).leases
        await hand_in(client, *(finished(lease, 2000) for lease in leases[:3]))
        orphan = spill / "1-0-1-9-00000000"
        orphan.write_bytes(b"a submit that never came back")
        late = spill / "1-9-0-1-00000000"
        late.write_bytes(b"of a draw that is still to come")
        await client.submit(samples_pb2.SubmittedSample(lease=leases[3].lease, failure="the environment went away"))
        assert (await client.batch(1)).HasField("batch")
        await client.publish(1)
        assert await client.commit(1) == 1
        assert list(spill.glob("*")) == [late]
