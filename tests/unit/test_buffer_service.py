"""The buffer over gRPC, on a real Redis: the walk, bad input, restarts of the buffer and of Redis, several fronts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry

from services.buffer.cursor import TaskCursor
from services.buffer.front import Front
from services.buffer.ledger import Rules
from services.buffer.redis_ledger import RedisLedger, connect
from services.buffer.service import registrations
from slipstream import rpc, sample
from slipstream.config import RunFile, parse
from slipstream.errors import Fenced, SlipstreamError, Unavailable
from slipstream.objects import FileStore
from slipstream.protos.buffer.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    samples_pb2,
    samples_pb2_grpc,
    scores_pb2,
    scores_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
)
from slipstream.protos.types.v1 import policy_pb2 as types_policy_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.telemetry import BufferMetrics
from tests.redis_server import RedisProcess, redis_process

WAIT = rpc.duration(5)


@dataclass
class Client:
    """Stubs on one buffer process, and the front behind them."""

    front: Front
    samples: Any
    scores: Any
    batches: Any
    policy: Any
    sessions: Any
    incarnation: int = 0

    async def begin(self) -> None:
        taken = await rpc.call(self.batches.TakeIncarnation, batches_pb2.TakeIncarnationRequest(), 5)
        self.incarnation = taken.incarnation
        await self.publish(0)

    async def publish(self, step: int) -> None:
        reserved = await rpc.call(
            self.policy.ReserveVersion, policy_pb2.ReserveVersionRequest(incarnation=self.incarnation, step=step), 5)
        version = types_policy_pb2.PolicyVersion(
            number=reserved.number, step=step, incarnation=self.incarnation, manifest_key=f"versions/{reserved.number}")
        await rpc.call(self.policy.PublishVersion, policy_pb2.PublishVersionRequest(version=version), 5)

    async def lease(self, count: int = 100, wait_s: float = 5, **fields: Any) -> samples_pb2.LeaseSamplesResponse:
        return await rpc.call(self.samples.LeaseSamples, samples_pb2.LeaseSamplesRequest(
            worker="rollout-0", max_samples=count, wait=rpc.duration(wait_s), **fields), 10)

    async def submit(self, *samples: samples_pb2.SubmittedSample) -> samples_pb2.SubmitSamplesResponse:
        return await rpc.call(
            self.samples.SubmitSamples, samples_pb2.SubmitSamplesRequest(worker="rollout-0", samples=samples), 5)

    async def score_all(self) -> int:
        unscored = await rpc.call(self.scores.LeaseUnscored, scores_pb2.LeaseUnscoredRequest(
            worker="reward-0", max_samples=100, wait=WAIT), 10)
        scores = [scores_pb2.ScoredSample(lease=s.lease, score=sample_pb2.Score(scalar=0)) for s in unscored.samples]
        done = await rpc.call(self.scores.SubmitScores, scores_pb2.SubmitScoresRequest(worker="reward-0", scores=scores), 5)
        assert not any(status.code for status in done.statuses)
        return len(scores)

    async def batch(self, batch: int, wait_s: float = 5) -> batches_pb2.LeaseBatchResponse:
        return await rpc.call(self.batches.LeaseBatch, batches_pb2.LeaseBatchRequest(
            incarnation=self.incarnation, batch=batch, wait=rpc.duration(wait_s)), 10)

    async def step(self, batch: int) -> dict[tuple[int, int], bytes]:
        """One whole step; the bodies that were submitted."""
        leases = (await self.lease()).leases
        done = [finished(lease, batch - 1) for lease in leases]
        await self.submit(*done)
        await self.score_all()
        return {(d.lease.sample.draw.number, d.lease.sample.index): d.body for d in done}


def finished(lease: samples_pb2.SampleLease, step: int = 0) -> samples_pb2.SubmittedSample:
    """What a rollout worker hands in for a lease."""
    segment = sample.Segment(
        np.asarray([lease.lease.sample.draw.number, lease.lease.sample.index, 7, 8], np.int32), np.arange(4) >= 2,
        np.full(2, -0.5, np.float32), (sample.Span(step + 1, step, 1, 2),))
    body = sample.encode(sample.Sample([segment]))
    return samples_pb2.SubmittedSample(
        lease=lease.lease, body=body, crc32c=sample.crc32c(body), tokens=4, generated_tokens=2, oldest_step=step,
        newest_step=step, transcript=sample_pb2.Transcript(response="78").SerializeToString())


def run_file(**schedule: Any) -> RunFile:
    return parse({
        "run": {"name": "svc", "steps": 20}, "model": {"path": "m"}, "environments": [{"name": "sort", "entry": "m:C"}],
        "schedule": {"groups_per_batch": 2, "group_size": 2, "max_lag": 1} | schedule})


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path / "redis") as process:
        yield process


@contextlib.asynccontextmanager
async def buffer(redis: RedisProcess, folder: Path, run: RunFile | None = None) -> AsyncIterator[Client]:
    """One buffer front on this Redis and this object folder."""
    run = run or run_file()
    rules, client = Rules.of(run), connect(redis.url)
    ledger = RedisLedger(client, rules)
    await ledger.open({"sort": 10})
    front = Front(ledger, BufferMetrics(CollectorRegistry()), run.hash)
    cursor = TaskCursor(rules.seed, rules.weights, {"sort": 10})
    async with rpc.Server("127.0.0.1", 0, registrations(front, FileStore(folder), cursor), grace_s=0.1) as server:
        channel = rpc.channel(server.address)
        yield Client(
            front, samples_pb2_grpc.SampleServiceStub(channel), scores_pb2_grpc.ScoreServiceStub(channel),
            batches_pb2_grpc.BatchServiceStub(channel), policy_pb2_grpc.PolicyServiceStub(channel),
            sessions_pb2_grpc.SessionServiceStub(channel))
        front.changes.close()
        await channel.close()
    await client.aclose()


async def read(client: Client, batch: int, *members: sample_pb2.SampleId) -> dict[tuple[int, int], bytes]:
    bodies = {}
    async for message in client.batches.ReadBatch(batches_pb2.ReadBatchRequest(batch=batch, samples=members)):
        for item in message.bodies:
            assert sample.crc32c(item.body) == item.crc32c
            bodies[item.sample.draw.number, item.sample.index] = item.body
    return bodies


async def test_the_walk(redis: RedisProcess, tmp_path: Path) -> None:
    """Lease, submit, score, lease the batch, read its bodies, publish, commit: what went in comes out."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted: dict[tuple[int, int], bytes] = {}
        for k in (1, 2, 3):
            submitted |= await client.step(k)
            batch = (await client.batch(k)).batch
            assert [g.draw.number for g in batch.groups] == [2 * k - 2, 2 * k - 1]
            bodies = await read(client, k)
            assert bodies == {(d, i): submitted[d, i] for d in (2 * k - 2, 2 * k - 1) for i in (0, 1)}
            assert len({(g.task.index, g.task.seed) for g in batch.groups}) == 2
            one = batch.groups[1].members[0].sample
            assert await read(client, k, one) == {(one.draw.number, 0): bodies[one.draw.number, 0]}
            await client.publish(k)
        await rpc.call(client.batches.CommitBatches, batches_pb2.CommitBatchesRequest(
            incarnation=client.incarnation, through_batch=3), 5)
        assert len(await read(client, 3)) == 4  # the batch log outlives the ledger's rows
        (await client.front.ledger.balance()).check(2)
        archived = "".join(p.read_text() for p in (tmp_path / "objects/ledger").iterdir())
        assert archived.count('"event": "batch"') == 3


async def test_each_bad_item_is_refused_alone(redis: RedisProcess, tmp_path: Path) -> None:
    """Statuses are per item, in order; the rest of the list is stored."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        good, bad = [finished(lease) for lease in (await client.lease(2)).leases]
        bad.crc32c += 1
        results = (await client.submit(bad, good)).results
        assert [r.status.code for r in results] == [code_pb2.INVALID_ARGUMENT, code_pb2.OK]
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_UNSPECIFIED, samples_pb2.OUTCOME_ACCEPTED]
        assert client.front.metrics.rejected.labels("CRC")._value.get() == 1


async def test_requests_that_cannot_be_served_say_why(redis: RedisProcess, tmp_path: Path) -> None:
    async with buffer(redis, tmp_path / "objects") as client:
        assert "trainer has not published" in (await client.lease(1, wait_s=0)).waiting_for
        await client.begin()
        with pytest.raises(Fenced, match="run file"):
            await client.lease(1, run_file_hash="0" * 64)
        with pytest.raises(SlipstreamError, match="max_samples"):
            await client.lease(0)
        with pytest.raises(grpc.aio.AioRpcError, match="lease it first"):
            await read(client, 1)
        with pytest.raises(SlipstreamError, match="not served") as error:
            await rpc.call(client.sessions.OpenSession, sessions_pb2.OpenSessionRequest(client="c"), 5)
        assert error.value.code == code_pb2.UNIMPLEMENTED
        await client.lease(3)
        assert (await client.batch(1, wait_s=0)).waiting_for == (
            "batch 1: 2 of 2 groups unfinished, oldest draw 0 leased by rollout-0")


async def test_a_crash_between_numbering_and_logging_is_repaired(redis: RedisProcess, tmp_path: Path) -> None:
    """The composition is durable in Redis; another process writes the batch log from the bodies that are still there."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted = await client.step(1)
        assert (await client.front.ledger.number_batch(1, 1)).numbered  # and now the process is gone
    async with buffer(redis, tmp_path / "objects") as client:
        client.incarnation = 1
        assert (await client.batch(1)).batch.ledger_sequence > 0
        bodies = await read(client, 1)
        assert len(bodies) == 4 and bodies.items() <= submitted.items()


async def test_redis_goes_and_comes_back(redis: RedisProcess, tmp_path: Path) -> None:
    """Calls are UNAVAILABLE with a retry delay, the process stays up, and nothing that was acknowledged is gone."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        leases = (await client.lease(4)).leases
        await client.submit(finished(leases[0]))
        redis.kill()
        with pytest.raises(Unavailable) as error:
            await client.submit(finished(leases[1]))
        assert error.value.retry_s is not None
        redis.start()
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(Unavailable):
                results = (await client.submit(*[finished(lease) for lease in leases])).results
                break
            assert time.monotonic() < deadline
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_ACCEPTED] * 4
        assert await client.score_all() == 4
        assert (await client.batch(1)).HasField("batch")


async def test_two_fronts_serve_one_ledger(redis: RedisProcess, tmp_path: Path) -> None:
    """A worker that waits at one front is woken by a publication at another; a watch there sees it too."""
    async with buffer(redis, tmp_path / "objects") as one, buffer(redis, tmp_path / "objects") as two:
        waiting = asyncio.create_task(two.lease(100))
        watch = two.policy.WatchVersions(policy_pb2.WatchVersionsRequest())
        await one.begin()
        watched = asyncio.create_task(two.front.refresh_versions(force=True))
        leases = (await waiting).leases
        await watched
        assert (await watch.read()).version.step == 0
        watch.cancel()
        assert len(leases) == 8
        await one.submit(*[finished(lease) for lease in leases[:4]])
        await two.score_all()
        assert len((await one.batch(1)).batch.groups) == 2
        await one.publish(1)
        assert {lease.lease.sample.draw.number for lease in (await two.lease()).leases} == {4, 5}


async def test_a_lost_ledger_is_rebuilt_behind_the_checkpoint(redis: RedisProcess, tmp_path: Path) -> None:
    """Redis came back empty: a new ledger epoch goes on after the batch log; leases of the old epoch are outdated."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        for k in (1, 2):
            await client.step(k)
            await client.batch(k)
            await client.publish(k)
        old = (await client.lease()).leases
        admin = connect(redis.url)
        await admin.flushall()
        await admin.aclose()
        await client.front.ledger.open({"sort": 10})
        taken = await rpc.call(
            client.batches.TakeIncarnation, batches_pb2.TakeIncarnationRequest(above=1, checkpoint_batch=1), 5)
        assert (taken.ledger_epoch, taken.numbered_batch, taken.committed_batch) == (2, 2, 1)
        client.incarnation = taken.incarnation
        assert len((await client.batch(2)).batch.groups) == 2  # served from the log
        await client.publish(2)
        results = (await client.submit(finished(old[0], 2))).results
        assert results[0].outcome == samples_pb2.OUTCOME_OUTDATED
        fresh = (await client.lease()).leases
        assert min(lease.lease.sample.draw.number for lease in fresh) == 4
        assert {lease.lease.sample.draw.ledger_epoch for lease in fresh} == {2}
        (await client.front.ledger.balance()).check(2)
