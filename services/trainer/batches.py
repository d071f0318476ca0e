"""Hop 4: from the buffer's numbered batch to groups of decoded samples.

Consumes: BatchService.LeaseBatch (long poll) and ReadBatch (stream). Produces: TrainingBatch, in memory, every body checked
against two checksums: the one beside it and the one in the batch's durable composition.
Waits for: the batch to be complete. Unblocked by: rollout and reward workers handing in its last samples; by this trainer
publishing (a batch may need the newest version) or committing (`checkpoint_now`).
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.trainer.packing import Group, Member
from services.trainer.records import AuditEntry
from slipstream import rpc
from slipstream.errors import InvalidInput, Unavailable, from_rpc_error
from slipstream.lifecycle import Clock, Waits
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2
from slipstream.sample import Segment, array, crc32c, decode, reward_of

POLL_S = 10.0
# An answer without a batch may come at once (checkpoint_now): ask again a little later.
PAUSE_S = 0.05
READ_TIMEOUT_S = 120.0
# Bodies that disagree with the composition are read again this often before the trainer gives up.
READ_TRIES = 3
FETCHES = 16  # objects read at a time

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """A numbered batch, decoded."""

    number: int
    groups: list[Group]
    audit: list[AuditEntry]
    ledger_sequence: int
    drops: dict[str, int]
    components: dict[str, float]
    score_failures: dict[str, int] = field(default_factory=dict)  # reason -> samples


class BatchReader:
    """Leases and reads batches. `checkpoint_now` is called when the buffer asks for a checkpoint before it can go on."""

    def __init__(
        self, stub: Any, clock: Clock, waits: Waits, checkpoint_now: Callable[[], object], routes: ObjectStore | None = None,
    ) -> None:
        """`routes`: the store that routes by reference are fetched from; None leaves them out."""
        self._stub, self._clock, self._waits, self._checkpoint_now, self._routes = stub, clock, waits, checkpoint_now, routes

    async def next(self, number: int, incarnation: int) -> TrainingBatch | None:
        """Batch `number`, or None when the run has no more. Raises Fenced, OutOfRange, InvalidInput."""
        batch = await self._lease(number, incarnation)
        return None if batch is None else await self._read(batch)

    async def _lease(self, number: int, incarnation: int) -> batches_pb2.Batch | None:
        request = batches_pb2.LeaseBatchRequest(incarnation=incarnation, batch=number, wait=rpc.duration(POLL_S))
        with self._waits.on(f"batch {number}", patient=True) as wait:
            while True:
                reply: batches_pb2.LeaseBatchResponse = await rpc.call_until(
                    self._stub.LeaseBatch, request, POLL_S + 10, self._waits, f"batch {number}: the buffer", self._clock)
                if reply.HasField("batch"):
                    return reply.batch
                if reply.finished:
                    return None
                if reply.checkpoint_now:
                    self._checkpoint_now()
                told, name = reply.waiting_for, f"batch {number}"
                wait.sentence = told if told.startswith(name) else f"{name}: {told}" if told else name
                await self._clock.sleep(PAUSE_S)

    async def _read(self, batch: batches_pb2.Batch) -> TrainingBatch:
        """Fetch and decode. Retries for ever while the buffer is away, READ_TRIES times when bodies are wrong."""
        tries = 0
        while True:
            bodies = await rpc.call_until(
                self._fetch, batches_pb2.ReadBatchRequest(batch=batch.batch), READ_TIMEOUT_S, self._waits,
                f"batch {batch.batch}: bodies from the buffer", self._clock)
            try:
                read = await asyncio.to_thread(assemble, batch, bodies)
                if self._routes is not None:
                    await self._read_routes(read, self._routes)
                return read
            except InvalidInput:
                tries += 1
                if tries == READ_TRIES:
                    raise

    async def _read_routes(self, batch: TrainingBatch, store: ObjectStore) -> None:
        async def fetch(_: None, timeout: float) -> None:
            try:
                async with asyncio.timeout(timeout):
                    await fetch_routes(batch, store)
            except TimeoutError:
                raise Unavailable(f"the routes were not there after {timeout:g} s", "TIMEOUT") from None

        what = f"batch {batch.number}: routes from the object store"
        await rpc.call_until(fetch, None, READ_TIMEOUT_S, self._waits, what, self._clock)

    async def _fetch(self, request: batches_pb2.ReadBatchRequest, timeout: float) -> dict[Key, bytes]:
        """Bodies by (epoch, draw, index); one whose checksum is wrong makes the whole read be tried again."""
        bodies: dict[Key, bytes] = {}
        try:
            async for reply in self._stub.ReadBatch(request, timeout=timeout):
                for item in reply.bodies:
                    if crc32c(item.body) != item.crc32c:
                        raise Unavailable(f"a body of batch {request.batch} was damaged on the way", "BODY_CHECKSUM")
                    bodies[_key(item.sample)] = item.body
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return bodies


def assemble(batch: batches_pb2.Batch, bodies: dict[Key, bytes]) -> TrainingBatch:
    """Composition and bodies as groups. Raises InvalidInput when a body is missing, other than recorded, or malformed."""
    groups: list[Group] = []
    audit: list[AuditEntry] = []
    components: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    for wire in batch.groups:
        members = []
        for member in wire.members:
            key = _key(member.sample)
            place = f"batch {batch.batch}: body of draw {key[1]}, sample {key[2]}"
            if (body := bodies.get(key)) is None:
                raise InvalidInput(f"{place} is missing from the batch log {batch.log_key}", "BODY_MISSING", batch=batch.batch)
            crc = crc32c(body)
            if member.HasField("body") and crc != member.body.crc32c:
                raise InvalidInput(f"{place} is not the one that was recorded", "BODY_CHECKSUM", batch=batch.batch)
            if member.score.failure:
                failures[member.score.failure[:200]] += 1
            members.append(Member(key[2], decode(body), reward_of(member.score)))
            audit.append((key[1], key[2], crc, key[0], trained_crc32c(members[-1], wire.mask_below_step)))
            for name, value in member.score.components.items():
                components.setdefault(name, []).append(value)
        groups.append(Group(wire.draw.number, members, wire.mask_below_step, wire.task.environment))
    drops: dict[str, int] = {}
    for drop in batch.drops:
        drops[drop.reason] = drops.get(drop.reason, 0) + 1
    means = {name: sum(values) / len(values) for name, values in sorted(components.items())}
    return TrainingBatch(batch.batch, groups, audit, batch.ledger_sequence, drops, means, dict(failures))


async def fetch_routes(batch: TrainingBatch, store: ObjectStore) -> None:
    """Put the routes that bodies only refer to into their segments.

    Raises Unavailable when the store cannot be reached; InvalidInput, naming draw and sample, when an object is gone, or its
    bytes or its shape are not those that were recorded.
    """
    at_once = asyncio.Semaphore(FETCHES)

    async def fetch(segment: Segment, reference: sample_pb2.Routes, place: str) -> None:
        where = reference.object
        async with at_once:
            data = await store.get(where.key, where.offset, where.size)
        if crc32c(data) != where.crc32c:
            raise InvalidInput(f"{place}: the routes in {where.key} are not those that were recorded", "ROUTES_CHECKSUM")
        segment.routes = array(tensor_pb2.Tensor(dtype=reference.dtype, shape=reference.shape, data=data), f"{place}.routes")

    try:
        async with asyncio.TaskGroup() as tasks:
            for group in batch.groups:
                for member in group.members:
                    for i, segment in enumerate(member.sample.segments):
                        if segment.routes is None and segment.routes_ref is not None:
                            tasks.create_task(fetch(
                                segment, segment.routes_ref, f"draw {group.draw}, sample {member.index}, segment {i}"))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def trained_crc32c(member: Member, mask_below_step: int) -> int:
    """Checksum of the arrays that enter the loss: equal in a replay, whatever the bodies went through."""
    arrays = [a.tobytes() for s in member.sample.segments for a in (s.tokens, s.loss_mask, s.logprobs)]
    return crc32c(b"".join((*arrays, struct.pack("<dq", member.reward, mask_below_step))))


def _key(sample: sample_pb2.SampleId) -> Key:
    return sample.draw.ledger_epoch, sample.draw.number, sample.index
