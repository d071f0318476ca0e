"""A trainer start's question to the ledger, and what happens when Redis has forgotten something.

The ledger gives out batch numbers, incarnations and publication numbers before anything is written under them. So whatever the
object store holds proves what the ledger must know, and a ledger that does not was lost or rewound:

    proof         in the object store                               the ledger is behind when
    checkpoint    the checkpoint's batch, epoch and sequence        it has numbered less, or its epoch or sequence is lower
    incarnation   the checkpoint pointer's incarnation              it has given out a lower one
    batch_log     the newest object below batches/                  it has numbered less
    composition   the same                                          it has numbered that batch at another time: another batch
    version       the newest folder below versions/                 its publication counter is lower
    epoch         ledger/rebuilt-<epoch>.json                       its epoch is lower

The store is read first: until the ledger is asked it can only get further ahead. What is rebuilt starts from the recovery
snapshot of the newest logged batch: every logged batch is numbered and is served from the log; what the snapshot calls live is
dropped(ledger lost) by name; draws after it are unknown: they are counted as an interval, and their tasks are drawn again. All
of it is written to ledger/rebuilt-<epoch>.json first, so that no epoch is ever given out twice, whatever Redis loses.

A pinned run loses nothing: which draws a batch has is fixed, so all that were not batched are drawn again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.buffer.batch_log import BatchLog, same
from services.buffer.cursor import TaskCursor
from services.buffer.ledger import Incarnation, Ledger, Rebuilt, Version
from slipstream import logs
from slipstream.errors import Fenced
from slipstream.manifest import checksum
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.telemetry import BufferMetrics

TRIES = 4  # each proof can make one rebuild necessary, and two fronts can meet once
_RECORD = "ledger/rebuilt-{:03d}.json"

log = logs.get("buffer")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the object store and the checkpoint know."""

    checkpoint: int  # batch
    epoch: int  # highest of checkpoint, batch log and records of rebuilds
    sequence: int  # of the checkpoint, within checkpoint_epoch
    checkpoint_epoch: int
    incarnation: int
    version: int
    newest: batches_pb2.Batch  # of batch 0 when none is logged


class Recovery:
    """Gives trainers their incarnation, on a ledger that knows at least what the object store knows."""

    def __init__(
            self, ledger: Ledger, store: ObjectStore, batch_log: BatchLog, cursor: TaskCursor, metrics: BufferMetrics) -> None:
        self._ledger, self._store, self._log, self._cursor, self._metrics = ledger, store, batch_log, cursor, metrics
        self._one = asyncio.Lock()

    async def take(self, request: batches_pb2.TakeIncarnationRequest) -> Incarnation:
        """A new incarnation. Raises Fenced: FORK, or LEDGER_LOST when the batch log cannot replace the ledger."""
        try:
            async with self._one:
                return await self._take(request)
        except Fenced as error:
            self._metrics.refused_starts.labels(error.reason).inc()
            log.error(f"a trainer start is refused: {error.message}", reason=error.reason)
            raise

    async def _take(self, request: batches_pb2.TakeIncarnationRequest) -> Incarnation:
        rebuilt = False
        for _ in range(TRIES):
            found = await self._evidence(request)
            meta = (await self._ledger.balance()).meta
            proof = _behind(meta, found, rebuilt)
            if not proof:
                taken = await self._ledger.take_incarnation(
                    found.incarnation, found.checkpoint, found.checkpoint_epoch, found.sequence)
                if not await self._differs(taken, found.newest):
                    return taken
                proof = "composition"
            await self._rebuild(proof, meta, found)
            rebuilt = True
        raise Fenced(f"the ledger is still behind its batch log after {TRIES} tries: start the trainer again", "LEDGER_BEHIND")

    async def _evidence(self, request: batches_pb2.TakeIncarnationRequest) -> Evidence:
        number = await self._log.newest()
        newest = await self._log.header(number, fresh=True) if number else batches_pb2.Batch()
        versions = [int(key.split("/")[1].split("-")[0]) for key in await self._store.list("versions/")]
        records = await self._store.list(_RECORD.partition("{")[0])
        epochs = [int(key.partition("rebuilt-")[2].removesuffix(".json")) for key in records]
        epochs += [group.draw.ledger_epoch for group in newest.groups] + [request.checkpoint_epoch]
        return Evidence(
            request.checkpoint_batch, max(epochs), request.checkpoint_sequence, request.checkpoint_epoch, request.above,
            max(versions, default=0), newest)

    async def _differs(self, taken: Incarnation, newest: batches_pb2.Batch) -> bool:
        """Whether the ledger numbered the newest logged batch, and it was another one."""
        if newest.batch <= taken.committed_batch:
            return False
        return not same(newest, await self._ledger.number_batch(taken.incarnation, newest.batch))

    async def _rebuild(self, proof: str, meta: Mapping[str, Any], found: Evidence) -> None:
        rules, newest = self._ledger.rules, found.newest
        if newest.batch < found.checkpoint:
            raise Fenced(
                f"the checkpoint is at batch {found.checkpoint}, the ledger is behind it and the batch log ends at "
                f"{newest.batch}: restore Redis or the object store, or start a new run.name", "LEDGER_LOST")
        if rules.pinned:
            next_draw, lost = newest.batch * rules.groups_per_batch, []
        else:
            next_draw = max([newest.next_draw, *(group.draw.number + 1 for group in newest.groups)])
            lost = sorted(newest.live_draws)
        epoch = max(found.epoch, int(meta.get("epoch", 0))) + 1
        unknown = (rules.max_lag + 1) * rules.groups_per_batch - len(lost)
        record = {
            "epoch": epoch, "proof": proof, "checkpoint": found.checkpoint, "numbered": newest.batch, "next_draw": next_draw,
            "dropped": {"ledger lost": lost}, "unknown": {"from": next_draw, "at_most_open": unknown}}
        if not await self._store.put_if_absent(_RECORD.format(epoch), json.dumps(record).encode()):
            return  # another front is at it: look again
        log.warning(
            f"the ledger was lost or rewound ({proof}) and is rebuilt from the batch log as epoch {epoch}: batches up to "
            f"{newest.batch} are kept; dropped(ledger lost): {_names(lost)}; unknown: draws from {next_draw} on, at most "
            f"{unknown} of them open, to be drawn again", proof=proof, epoch=epoch, numbered=newest.batch, dropped=len(lost))
        await self._ledger.rebuild(Rebuilt(
            seen_epoch=int(meta.get("epoch", 0)), numbered=newest.batch, committed=found.checkpoint, next_draw=next_draw,
            version=found.version, cursor=await asyncio.to_thread(self._cursor.counts_before, next_draw), epoch=epoch - 1,
            sequence=max(found.sequence, newest.ledger_sequence), versions=await self._versions(found.checkpoint),
            lost_draws=lost))
        self._metrics.ledger_rebuilds.labels(proof).inc()

    async def _versions(self, checkpoint: int) -> list[Version]:
        """Published versions that open draws of a pinned schedule may name: of each step, that of the highest incarnation."""
        found: dict[int, Version] = {}
        if not self._ledger.rules.pinned:
            return []
        for key in await self._store.list("versions/"):
            if not key.endswith("/manifest.json"):
                continue
            text = await self._store.get(key)
            fields = json.loads(text)
            version = Version(fields["number"], fields["step"], fields["incarnation"], key, checksum(text))
            former = found.get(version.step)
            if version.step <= checkpoint and (former is None or former.incarnation < version.incarnation):
                found[version.step] = version
        return sorted(found.values(), key=lambda version: version.number)


def _behind(meta: Mapping[str, Any], found: Evidence, rebuilt: bool) -> str:
    """Name of the proof that the ledger has forgotten something; empty without one. One that was just rebuilt gives out its
    next incarnation above the pointer's, but knows of none yet."""
    own = {name: int(meta.get(name, 0)) for name in ("numbered", "incarnation", "version", "epoch", "sequence")}
    if found.checkpoint > own["numbered"] or (found.checkpoint_epoch == own["epoch"] and found.sequence > own["sequence"]):
        return "checkpoint"
    for proof, known, needed in (
            ("batch_log", own["numbered"], found.newest.batch), ("version", own["version"], found.version),
            ("incarnation", own["incarnation"], 0 if rebuilt else found.incarnation), ("epoch", own["epoch"], found.epoch)):
        if known < needed:
            return proof
    return ""


def _names(draws: list[int]) -> str:
    shown = ", ".join(map(str, draws[:20]))
    return f"draws {shown}{', ...' if len(draws) > 20 else ''} ({len(draws)})" if draws else "none"
