"""A buffer in this process, over real gRPC on a real Redis-protocol server, and a client with one method per call.

    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        leases = (await client.lease()).leases
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.rpc import status_pb2
from prometheus_client import CollectorRegistry

from services.buffer.cursor import TaskCursor
from services.buffer.front import Front
from services.buffer.ledger import Rules
from services.buffer.redis_ledger import RedisLedger, connect
from services.buffer.service import registrations
from slipstream import rpc, sample
from slipstream.config import RunFile, parse
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
    sessions_pb2_grpc,
)
from slipstream.protos.types.v1 import policy_pb2 as types_policy_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.telemetry import BufferMetrics
from tests.redis_server import RedisProcess


@dataclass
class Client:
    """Stubs on one buffer process, and the front behind them. Plays rollout-0, reward-0 and the trainer."""

    front: Front | None  # None when the buffer is another process
    samples: Any
    scores: Any
    batches: Any
    policy: Any
    sessions: Any
    incarnation: int = 0
    address: str = ""

    async def lease(self, count: int = 100, wait_s: float = 5, **fields: Any) -> samples_pb2.LeaseSamplesResponse:
        return await rpc.call(self.samples.LeaseSamples, samples_pb2.LeaseSamplesRequest(
            worker="rollout-0", max_samples=count, wait=rpc.duration(wait_s), **fields), 10)

    async def submit(self, *samples: samples_pb2.SubmittedSample) -> samples_pb2.SubmitSamplesResponse:
        return await rpc.call(
            self.samples.SubmitSamples, samples_pb2.SubmitSamplesRequest(worker="rollout-0", samples=samples), 5)

    async def lease_unscored(self, count: int = 100, wait_s: float = 5) -> list[scores_pb2.UnscoredSample]:
        response = await rpc.call(self.scores.LeaseUnscored, scores_pb2.LeaseUnscoredRequest(
            worker="reward-0", max_samples=count, wait=rpc.duration(wait_s)), 10)
        return list(response.samples)

    async def submit_scores(self, scores: Iterable[scores_pb2.ScoredSample]) -> list[status_pb2.Status]:
        response = await rpc.call(
            self.scores.SubmitScores, scores_pb2.SubmitScoresRequest(worker="reward-0", scores=scores), 5)
        return list(response.statuses)

    async def score_all(self) -> int:
        """Score 0 for whatever is unscored; how many."""
        scores = [
            scores_pb2.ScoredSample(lease=s.lease, score=sample_pb2.Score(scalar=0)) for s in await self.lease_unscored()]
        assert not any(status.code for status in await self.submit_scores(scores))
        return len(scores)

    async def batch(self, batch: int, wait_s: float = 5, **fields: Any) -> batches_pb2.LeaseBatchResponse:
        return await rpc.call(self.batches.LeaseBatch, batches_pb2.LeaseBatchRequest(
            incarnation=self.incarnation, batch=batch, wait=rpc.duration(wait_s), **fields), 10)

    def read_messages(self, batch: int, *members: sample_pb2.SampleId) -> AsyncIterator[batches_pb2.ReadBatchResponse]:
        """Bodies of a numbered batch as they come."""
        return self.batches.ReadBatch(batches_pb2.ReadBatchRequest(batch=batch, samples=members))

    async def read(self, batch: int, *members: sample_pb2.SampleId) -> dict[tuple[int, int], bytes]:
        """Bodies of a numbered batch by (draw, index), each compared with its checksum."""
        bodies = {}
        async for message in self.read_messages(batch, *members):
            for item in message.bodies:
                assert sample.crc32c(item.body) == item.crc32c
                bodies[item.sample.draw.number, item.sample.index] = item.body
        return bodies

    async def take_incarnation(self, **fields: Any) -> batches_pb2.TakeIncarnationResponse:
        """Become the trainer."""
        taken = await rpc.call(self.batches.TakeIncarnation, batches_pb2.TakeIncarnationRequest(**fields), 5)
        self.incarnation = taken.incarnation
        return taken

    async def reserve(self, step: int) -> int:
        """A publication number."""
        reserved = await rpc.call(
            self.policy.ReserveVersion, policy_pb2.ReserveVersionRequest(incarnation=self.incarnation, step=step), 5)
        return reserved.number

    async def announce(self, version: types_policy_pb2.PolicyVersion) -> None:
        await rpc.call(self.policy.PublishVersion, policy_pb2.PublishVersionRequest(version=version), 5)

    async def publish(self, step: int) -> None:
        """A version whose manifest nobody ever reads."""
        number = await self.reserve(step)
        await self.announce(types_policy_pb2.PolicyVersion(
            number=number, step=step, incarnation=self.incarnation, manifest_key=f"versions/{number}"))

    async def begin(self) -> None:
        """What a trainer does first."""
        await self.take_incarnation()
        await self.publish(0)

    async def commit(self, through_batch: int, checkpoint_key: str = "") -> int:
        committed = await rpc.call(self.batches.CommitBatches, batches_pb2.CommitBatchesRequest(
            incarnation=self.incarnation, through_batch=through_batch, checkpoint_key=checkpoint_key), 5)
        return committed.committed_batch

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
    """A run of 2 groups of 2 samples a batch; `schedule` overrides."""
    return parse({
        "run": {"name": "svc", "steps": 20}, "model": {"path": "m"}, "environments": [{"name": "sort", "entry": "m:C"}],
        "schedule": {"groups_per_batch": 2, "group_size": 2, "max_lag": 1} | schedule})


@contextlib.asynccontextmanager
async def buffer(redis: RedisProcess, folder: Path, run: RunFile | None = None, tasks: int = 10) -> AsyncIterator[Client]:
    """One buffer front on this Redis and this object folder; each environment of the run has `tasks` tasks."""
    run = run or run_file()
    rules, client, of_environment = Rules.of(run), connect(redis.url), {e.name: tasks for e in run.environments}
    ledger = RedisLedger(client, rules)
    await ledger.open(of_environment)
    front = Front(ledger, BufferMetrics(CollectorRegistry()), run.hash)
    cursor = TaskCursor(rules.seed, rules.weights, of_environment)
    async with rpc.Server("127.0.0.1", 0, registrations(front, FileStore(folder), cursor), grace_s=0.1) as server:
        channel = rpc.channel(server.address)
        yield Client(
            front, samples_pb2_grpc.SampleServiceStub(channel), scores_pb2_grpc.ScoreServiceStub(channel),
            batches_pb2_grpc.BatchServiceStub(channel), policy_pb2_grpc.PolicyServiceStub(channel),
            sessions_pb2_grpc.SessionServiceStub(channel), address=server.address)
        front.changes.close()
        await channel.close()
    await client.aclose()
