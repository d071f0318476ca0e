"""The buffer as the trainer sees it: numbered batches of synthetic samples, incarnations, version events, commits.

Everything that happens is noted in `events`, in order. `gate` decides whether a batch is ready: "" or what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.trainer.packing import Group
from slipstream.errors import Fenced
from slipstream.protos.buffer.v1 import batches_pb2, batches_pb2_grpc, policy_pb2, policy_pb2_grpc
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import crc32c, encode
from tests.trainer_samples import groups


class FakeBuffer(batches_pb2_grpc.BatchServiceServicer, policy_pb2_grpc.PolicyServiceServicer):
    def __init__(self, steps: int = 4, rewards: tuple[float, ...] = (0, 1, 0, 1)) -> None:
        self.steps, self.rewards = steps, rewards
        self.events: list[tuple[Any, ...]] = []
        self.incarnation = self.number = self.committed = 0
        self.gate: Callable[[int], str] = lambda batch: ""
        self.checkpoint_now: Callable[[int], bool] = lambda batch: False
        self.checkpoints_told: list[tuple[int, int]] = []  # (ledger epoch, sequence) that a start resumes from
        self.damaged_reads = 0
        self.reads: list[int] = []  # batches whose bodies were asked for
        self.brings: Callable[[int, list[bytes]], list[bytes]] = lambda batch, bodies: []  # bodies that come with a batch
        self.reserves_ahead = False  # a number for the next version with the announcement of the one before
        self.on_event: Callable[[tuple[Any, ...]], None] = lambda event: None

    @property
    def registrations(self) -> list[Any]:
        return [(batches_pb2_grpc.add_BatchServiceServicer_to_server, self),
                (policy_pb2_grpc.add_PolicyServiceServicer_to_server, self)]

    def kinds(self, *names: str) -> list[tuple[Any, ...]]:
        return [e for e in self.events if e[0] in names]

    def groups(self, batch: int) -> list[Group]:
        return groups(seed=batch, rewards=self.rewards, step=max(0, batch - 2))

    async def TakeIncarnation(self, request: batches_pb2.TakeIncarnationRequest, context: Any):
        self.incarnation = max(self.incarnation, request.above) + 1
        self.checkpoints_told.append((request.checkpoint_epoch, request.checkpoint_sequence))
        self._note("incarnation", self.incarnation, request.checkpoint_batch)
        return batches_pb2.TakeIncarnationResponse(
            incarnation=self.incarnation, committed_batch=self.committed, ledger_epoch=3, ledger_sequence=5)

    async def LeaseBatch(self, request: batches_pb2.LeaseBatchRequest, context: Any):
        self._fence(request.incarnation)
        if request.batch > self.steps:
            return batches_pb2.LeaseBatchResponse(finished=True)
        if missing := self.gate(request.batch):
            return batches_pb2.LeaseBatchResponse(waiting_for=missing, checkpoint_now=self.checkpoint_now(request.batch))
        self._note("lease", request.batch)
        bodies = [encode(m.sample) for g in self.groups(request.batch) for m in g.members]
        brought = self.brings(request.batch, bodies) if request.bodies_up_to_bytes else []
        return batches_pb2.LeaseBatchResponse(batch=self._composition(request.batch), bodies=brought)

    async def ReadBatch(self, request: batches_pb2.ReadBatchRequest, context: Any):
        self.reads.append(request.batch)
        damaged, self.damaged_reads = self.damaged_reads > 0, self.damaged_reads - 1
        for group in self.groups(request.batch):
            reply = batches_pb2.ReadBatchResponse()
            for member in group.members:
                body = encode(member.sample)
                sent = body[:-1] + b"\xff" if damaged else body
                reply.bodies.add(sample=_id(group.draw, member.index), body=sent, crc32c=crc32c(body))
            yield reply

    async def CommitBatches(self, request: batches_pb2.CommitBatchesRequest, context: Any):
        self._fence(request.incarnation)
        self.committed = max(self.committed, request.through_batch)
        self._note("commit", request.through_batch, request.checkpoint_key)
        return batches_pb2.CommitBatchesResponse(committed_batch=self.committed)

    async def ReserveVersion(self, request: policy_pb2.ReserveVersionRequest, context: Any):
        self._fence(request.incarnation)
        self.number += 1
        self._note("reserve", request.step)
        return policy_pb2.ReserveVersionResponse(number=self.number)

    async def PublishVersion(self, request: policy_pb2.PublishVersionRequest, context: Any):
        self._fence(request.version.incarnation)
        self._note("publish", request.version.step, request.version)
        if not (self.reserves_ahead and request.next_step):
            return policy_pb2.PublishVersionResponse()
        self.number += 1
        return policy_pb2.PublishVersionResponse(next_number=self.number)

    async def ListVersions(self, request: policy_pb2.ListVersionsRequest, context: Any):
        return policy_pb2.ListVersionsResponse()

    def _composition(self, number: int) -> batches_pb2.Batch:
        batch = batches_pb2.Batch(run="test", batch=number, ledger_sequence=10 * number)
        for group in self.groups(number):
            wire = batch.groups.add(group_size=len(group.members))
            wire.draw.number = group.draw
            for member in group.members:
                entry = wire.members.add(sample=_id(group.draw, member.index))
                entry.score.scalar = member.reward
                entry.body.crc32c = crc32c(encode(member.sample))
        return batch

    def _fence(self, incarnation: int) -> None:
        if incarnation < self.incarnation:
            raise Fenced(f"incarnation {incarnation} is below {self.incarnation}", "FENCED")

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.on_event(event)


def _id(draw: int, index: int) -> sample_pb2.SampleId:
    return sample_pb2.SampleId(draw=sample_pb2.DrawId(number=draw), index=index)
