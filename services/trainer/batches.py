"""Hop 4: from the buffer's numbered batch to groups of decoded samples.

Consumes: BatchService.LeaseBatch (long poll), which brings few bodies along, and ReadBatch (stream). Produces: TrainingBatch,
in memory, every body checked against the checksum in the batch's durable composition; of a stream also the one beside it.
Waits for: the batch to be complete. Unblocked by: rollout and reward workers handing in its last samples; by this trainer
publishing (a batch may need the newest version) or committing (`checkpoint_now`).
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from services.trainer.packing import Group, Member
from services.trainer.records import AuditEntry
from slipstream import rpc
from slipstream.errors import InvalidInput, Unavailable, from_rpc_error
from slipstream.lifecycle import Clock, Waits
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2
from slipstream.sample import Sample, array, crc32c, decode, reward_of, turn_numbers

POLL_S = 10.0
# An answer without a batch may come at once (checkpoint_now): ask again a little later.
PAUSE_S = 0.05
READ_TIMEOUT_S = 120.0
# Bodies that disagree with the composition are read again this often before the trainer gives up.
READ_TRIES = 3
INLINE_BYTES = 1 << 20  # bodies of a batch that may come with its composition: no more than one message of ReadBatch has
FETCHES = 16  # objects read at a time

Key = tuple[int, int, int]
_REWARD = struct.Struct("<dq")


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
        credit: str = "sample",
    ) -> None:
        """`routes`: the store that routes by reference are fetched from; None leaves them there. `credit`: algorithm.credit."""
        self._stub, self._clock, self._waits, self._checkpoint_now, self._routes = stub, clock, waits, checkpoint_now, routes
        self._credit = credit

    async def next(self, number: int, incarnation: int) -> TrainingBatch | None:
        """Batch `number`, or None when the run has no more. Raises Fenced, OutOfRange, InvalidInput."""
        leased = await self._lease(number, incarnation)
        return None if leased is None else await self._read(leased.batch, leased.bodies)

    async def _lease(self, number: int, incarnation: int) -> batches_pb2.LeaseBatchResponse | None:
        request = batches_pb2.LeaseBatchRequest(
            incarnation=incarnation, batch=number, wait=rpc.duration(POLL_S), bodies_up_to_bytes=INLINE_BYTES)
        with self._waits.on(f"batch {number}", patient=True) as wait:
            while True:
                reply: batches_pb2.LeaseBatchResponse = await rpc.call_until(
                    self._stub.LeaseBatch, request, POLL_S + 10, self._waits, f"batch {number}: the buffer", self._clock)
                if reply.HasField("batch"):
                    return reply
                if reply.finished:
                    return None
                if reply.checkpoint_now:
                    self._checkpoint_now()
                told, name = reply.waiting_for, f"batch {number}"
                wait.sentence = told if told.startswith(name) else f"{name}: {told}" if told else name
                await self._clock.sleep(PAUSE_S)

    async def _read(self, batch: batches_pb2.Batch, inline: Sequence[bytes]) -> TrainingBatch:
        """Fetch what did not come along; decode. Retries for ever while the buffer is away, READ_TRIES times what is wrong."""
        tries = 0
        keys = [_key(member.sample) for group in batch.groups for member in group.members]
        bodies = dict(zip(keys, inline, strict=True)) if len(inline) == len(keys) else {}
        while True:
            if not bodies:
                bodies = await rpc.call_until(
                    self._fetch, batches_pb2.ReadBatchRequest(batch=batch.batch), READ_TIMEOUT_S, self._waits,
                    f"batch {batch.batch}: bodies from the buffer", self._clock)
            try:
                read = await asyncio.to_thread(assemble, batch, bodies, self._credit)
                if self._routes is not None:
                    await self._read_routes(read, self._routes)
                return read
            except InvalidInput:
                bodies, tries = {}, tries + 1
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


def assemble(batch: batches_pb2.Batch, bodies: dict[Key, bytes], credit: str = "sample") -> TrainingBatch:
    """Composition and bodies as groups, rewards where `algorithm.credit` puts them.

    Raises InvalidInput when a body is missing, other than recorded, or malformed.
    """
    groups: list[Group] = []
    audit: list[AuditEntry] = []
    components: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    for wire in batch.groups:
        members = []
        for member in wire.members:
            key = _key(member.sample)
            if (body := bodies.get(key)) is None:
                raise _unusable(batch, key, f"is missing from the batch log {batch.log_key}", "BODY_MISSING")
            crc = crc32c(body)
            if member.HasField("body") and crc != member.body.crc32c:
                raise _unusable(batch, key, "is not the one that was recorded", "BODY_CHECKSUM")
            sample = decode(body)
            reward, rewards, failure = placed(member.score, sample, credit)
            if failure:
                failures[failure[:200]] += 1
            members.append(Member(key[2], sample, reward, rewards))
            audit.append((key[1], key[2], crc, key[0], trained_crc32c(members[-1], wire.mask_below_step)))
            for name, value in member.score.components.items():
                components.setdefault(name, []).append(value)
        groups.append(Group(wire.draw.number, members, wire.mask_below_step, wire.task.environment))
    drops: dict[str, int] = {}
    for drop in batch.drops:
        drops[drop.reason] = drops.get(drop.reason, 0) + 1
    means = {name: sum(values) / len(values) for name, values in sorted(components.items())}
    return TrainingBatch(batch.batch, groups, audit, batch.ledger_sequence, drops, means, dict(failures))


def _unusable(batch: batches_pb2.Batch, key: Key, why: str, reason: str) -> InvalidInput:
    return InvalidInput(f"batch {batch.batch}: body of draw {key[1]}, sample {key[2]} {why}", reason, batch=batch.batch)


def placed(score: sample_pb2.Score, sample: Sample, credit: str) -> tuple[float, np.ndarray | None, str]:
    """A sample's reward; its part of each generated token, segment by segment (None: all on the last); why it failed.

    The scalar is the whole. With credit = turn each value of `per_turn` lies on the last token of its model call, with credit =
    token each of `per_token` on its token; what they leave of the scalar lies on the last token of the episode. A score without
    such values is all on the last token. One with more or fewer values than calls or tokens is a failure: it counts as 0.

    Example: scalar 1, per_turn 0.2 0.3, calls of two and three tokens: 0 0.2 0 0 0.8.
    """
    if score.failure or credit == "sample":
        return reward_of(score), None, score.failure
    turns = turn_numbers(sample)
    rewards, of_turn = np.zeros(sample.generated_tokens), np.concatenate(turns)
    if len(rewards) != len(of_turn):  # malformed: who makes rows of it tells which segment
        return reward_of(score), None, ""
    order = np.argsort(of_turn, kind="stable")  # tokens in the order of the calls
    if credit == "turn" and score.per_turn:
        calls = max((turn + 1 for s in sample.segments for turn, _ in s.turns), default=int(of_turn.max(initial=-1)) + 1)
        if len(score.per_turn) != calls:
            return 0.0, None, f"per_turn: {len(score.per_turn)} values for {calls} model calls"
        ends = np.searchsorted(of_turn[order], np.arange(calls), side="right") - 1
        np.add.at(rewards, order[np.maximum(ends, 0)], score.per_turn)  # a call without tokens: the last one before it
    elif credit == "token" and score.HasField("per_token"):
        values = array(score.per_token, "score.per_token")
        if values.shape != rewards.shape:
            return 0.0, None, f"per_token: shape {list(values.shape)} for {len(rewards)} generated tokens"
        rewards += values
    else:
        return reward_of(score), None, ""
    rewards[order[-1]] += score.scalar - rewards.sum()
    return reward_of(score), rewards, ""


async def fetch_routes(batch: TrainingBatch, store: ObjectStore) -> None:
    """Put the routes that bodies only refer to into their segments.

    Raises Unavailable when the store cannot be reached; InvalidInput, naming draw and sample, when an object is gone, or its
    bytes or its shape are not those that were recorded.
    """
    wanted = [
        (segment, segment.routes_ref, f"draw {group.draw}, sample {member.index}, segment {i}")
        for group in batch.groups for member in group.members for i, segment in enumerate(member.sample.segments)
        if segment.routes is None and segment.routes_ref is not None]
    found = await read_routes(store, [(reference, place) for _, reference, place in wanted])
    for (segment, _, _), routes in zip(wanted, found, strict=True):
        segment.routes = routes


async def read_routes(store: ObjectStore, wanted: Sequence[tuple[sample_pb2.Routes, str]]) -> list[np.ndarray]:
    """What (reference, place in the batch) pairs name, uint8 or uint16 [T - 1, L, K] each. Errors as of `fetch_routes`."""
    at_once = asyncio.Semaphore(FETCHES)

    async def fetch(reference: sample_pb2.Routes, place: str) -> np.ndarray:
        where = reference.object
        async with at_once:
            data = await store.get(where.key, where.offset, where.size)
        if crc32c(data) != where.crc32c:
            raise InvalidInput(f"{place}: the routes in {where.key} are not those that were recorded", "ROUTES_CHECKSUM")
        return array(tensor_pb2.Tensor(dtype=reference.dtype, shape=reference.shape, data=data), f"{place}.routes")

    try:
        async with asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(fetch(*pair)) for pair in wanted]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in made]


def trained_crc32c(member: Member, mask_below_step: int) -> int:
    """Checksum of the arrays that enter the loss: equal in a replay, whatever the bodies went through."""
    arrays: list[bytes] = []
    for s in member.sample.segments:
        arrays += s.tokens.tobytes(), s.loss_mask.tobytes(), s.logprobs.tobytes()
    if member.rewards is not None:
        arrays.append(member.rewards.tobytes())
    arrays.append(_REWARD.pack(member.reward, mask_below_step))
    return crc32c(b"".join(arrays))


def _key(sample: sample_pb2.SampleId) -> Key:
    return sample.draw.ledger_epoch, sample.draw.number, sample.index
