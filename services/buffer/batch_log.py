"""The batch log: one object per numbered batch with its composition and all bodies. The truth for replay, fork and rescoring.

Its layout is in slipstream/batch_log.py, for everybody who reads it.

The bytes are a function of the ledger's records alone, so that whoever writes it, however often, writes the same.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from services.buffer.ledger import BatchedGroup, Composition, Numbering
from slipstream import seeds
from slipstream.batch_log import HEAD, MAGIC, log_key, numbers, read_header
from slipstream.errors import Fenced, NotFound, SlipstreamError
from slipstream.objects import ObjectStore, Piece
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import crc32c

_VARINT = 10  # most bytes by which one offset can grow when the start of the bodies moves
MESSAGE_BYTES = 1 << 20
MEMBERS_AT_ONCE = 64  # of a batch that is being built: about a millisecond
_CACHED_BYTES = 256 << 20


async def build(run: str, seed: int, composition: Composition) -> tuple[batches_pb2.Batch, list[Piece]]:
    """The `Batch` of a composition, and its log object in pieces (three, then the bodies). `seed` is that of the run.

    A thousand members take tens of milliseconds, so other calls have their turn between any few groups.
    """
    batch, members = _head(run, composition), 0
    for group in composition.groups:
        _add(batch, seed, composition.ledger_epoch, group)
        members += len(group.members)
        if members >= MEMBERS_AT_ONCE:
            members = 0
            await asyncio.sleep(0)
    return batch, _pieces(batch, composition)


def _pieces(batch: batches_pb2.Batch, composition: Composition) -> list[Piece]:
    """The log object of a batch, whose references get their offsets."""
    refs = [member.body for group in batch.groups for member in group.members]
    start = HEAD.size + batch.ByteSize() + _VARINT * len(refs)
    start += -start % 64
    offset = start
    for ref in refs:
        ref.offset = offset
        offset += ref.size
    header = batch.SerializeToString(deterministic=True)
    padding = bytes(start - HEAD.size - len(header))
    bodies = [m.body for g in composition.groups for m in g.members]
    return [HEAD.pack(MAGIC, len(header), crc32c(header), 0), header, padding, *bodies]


def _head(run: str, composition: Composition) -> batches_pb2.Batch:
    """The batch without its groups."""
    key, epoch = log_key(composition.batch), composition.ledger_epoch
    batch = batches_pb2.Batch(
        run=run, batch=composition.batch, log_key=key, ledger_sequence=composition.ledger_sequence,
        numbered_unix_ms=composition.numbered_ms, next_draw=composition.next_draw, live_draws=composition.live)
    for draw, reason in composition.drops:
        batch.drops.add(draw=sample_pb2.DrawId(ledger_epoch=epoch, number=draw), reason=reason)
    return batch


def _add(batch: batches_pb2.Batch, seed: int, epoch: int, group: BatchedGroup) -> None:
    draw = sample_pb2.DrawId(ledger_epoch=epoch, number=group.draw)
    out = batch.groups.add(
        draw=draw, group_size=group.group_size, lag=max(0, group.lag), mask_below_step=group.mask_below_step,
        no_signal=group.no_signal,
        task=sample_pb2.Task(
            environment=group.environment, index=group.task_index, seed=seeds.task_seed(seed, group.environment, group.draw)))
    member = batches_pb2.BatchMember()  # filled for each, copied: making one from nothing takes three times as long
    sample, body = member.sample, member.body
    sample.draw.CopyFrom(draw)
    body.key = batch.log_key
    for m in group.members:
        sample.index, body.size, body.crc32c = m.index, len(m.body), m.crc32c
        member.oldest_step, member.newest_step = m.oldest_step, m.newest_step
        member.tokens, member.generated_tokens = m.tokens, m.generated_tokens
        member.score.ParseFromString(m.score)
        out.members.append(member)


def same(logged: batches_pb2.Batch, numbering: Numbering) -> bool:
    """Whether the ledger's batch k is the logged one. One that it knows from the log alone has no time of its own."""
    if not numbering.sequence:
        return True
    return (logged.ledger_sequence, logged.numbered_unix_ms) == (numbering.sequence, numbering.numbered_ms)


def diverged(batch: int) -> Fenced:
    """The refusal of a ledger that numbered k again after it was rewound: the log is the truth."""
    return Fenced(
        f"batch {batch} is in the batch log with another composition: the ledger was rewound; start the trainer again, which "
        "rebuilds it from the log", "LEDGER_BEHIND", batch=batch)


class BatchLog:
    """Writes and reads batch log objects. Keeps the newest ones, which every rank is about to read, in memory."""

    def __init__(self, store: ObjectStore, run: str, seed: int) -> None:
        self._store, self._run, self._seed = store, run, seed
        self._batches: OrderedDict[int, batches_pb2.Batch] = OrderedDict()
        self._bodies: OrderedDict[int, list[bytes]] = OrderedDict()

    async def write(self, composition: Composition) -> batches_pb2.Batch:
        """Put the object if it is absent; durable when this returns. Raises Fenced when another batch k is there."""
        batch, pieces = await build(self._run, self._seed, composition)
        if not await self._store.put_if_absent(batch.log_key, pieces) and await read_header(self._store, batch.batch) != batch:
            raise diverged(batch.batch)
        self._keep(batch, [m.body for g in composition.groups for m in g.members])
        return batch

    def known(self, batch: int) -> batches_pb2.Batch | None:
        """A composition that this process has written or read lately."""
        return self._batches.get(batch)

    def bodies(self, batch: int, most_bytes: int) -> Sequence[bytes]:
        """All bodies of a batch in the order of its members, if they are in memory and no more than `most_bytes`; else none."""
        kept = self._bodies.get(batch, ())
        return kept if sum(map(len, kept)) <= most_bytes else ()

    async def header(self, batch: int, fresh: bool = False) -> batches_pb2.Batch:
        """The composition of a logged batch, from the store itself when `fresh`. Raises NotFound."""
        if batch in self._batches and not fresh:
            return self._batches[batch]
        self._keep(found := await read_header(self._store, batch), None)
        return found

    async def newest(self) -> int:
        """Number of the newest logged batch; 0 without one."""
        return max(await numbers(self._store), default=0)

    async def read(
            self, batch: int, samples: Sequence[sample_pb2.SampleId]) -> AsyncIterator[batches_pb2.ReadBatchResponse]:
        """Bodies of the members (all when `samples` is empty) in draw order, about 1 MB per message. Raises NotFound."""
        header = await self.header(batch)
        wanted = {(s.draw.ledger_epoch, s.draw.number, s.index) for s in samples}
        members = [
            (n, m) for n, m in enumerate(m for g in header.groups for m in g.members)
            if not wanted or (m.sample.draw.ledger_epoch, m.sample.draw.number, m.sample.index) in wanted]
        if wanted and len(members) < len(wanted):
            missing = len(wanted) - len(members)
            raise NotFound(f"batch {batch} lacks {missing} of the {len(wanted)} samples", "NO_MEMBER", batch=batch)
        first = 0
        while first < len(members):
            last, size, begin = first, 0, members[first][1].body.offset
            while last < len(members):
                ref = members[last][1].body
                size += ref.size
                if last > first and (size > MESSAGE_BYTES or ref.offset + ref.size - begin > 4 * MESSAGE_BYTES):
                    break
                last += 1
            yield await self._message(batch, members[first:last])
            first = last

    async def _message(
            self, batch: int, members: Sequence[tuple[int, batches_pb2.BatchMember]]) -> batches_pb2.ReadBatchResponse:
        response = batches_pb2.ReadBatchResponse()
        cached = self._bodies.get(batch)
        data, base = b"", 0
        if cached is None:  # one read from the first to the last; what lies between is at most what was not asked for
            base, end = members[0][1].body.offset, members[-1][1].body.offset + members[-1][1].body.size
            data = await self._store.get(log_key(batch), base, end - base)
        for number, member in members:
            ref = member.body
            body = cached[number] if cached else data[ref.offset - base:ref.offset - base + ref.size]
            if cached is None and crc32c(body) != ref.crc32c:
                raise SlipstreamError(
                    f"batch log {ref.key} is damaged at byte {ref.offset}: the body does not match its checksum", "BATCH_LOG")
            response.bodies.add(sample=member.sample, body=body, crc32c=ref.crc32c)
        return response

    def _keep(self, batch: batches_pb2.Batch, bodies: list[bytes] | None) -> None:
        self._batches[batch.batch] = batch
        while len(self._batches) > 8:
            self._batches.popitem(last=False)
        if bodies is not None:
            self._bodies[batch.batch] = bodies
            while len(self._bodies) > 1 and (
                    len(self._bodies) > 4 or sum(map(len, (b for bs in self._bodies.values() for b in bs))) > _CACHED_BYTES):
                self._bodies.popitem(last=False)
