"""BatchService: hops 4 and 6.

Consumes: TakeIncarnation, LeaseBatch, ReadBatch, CommitBatches of the trainer.
Produces: numbered batches, their log objects, archived ledger lines.
Waits for: enough complete groups (long poll). Unblocked by: a scored or closed sample, a dropped group, the end of the wait;
`checkpoint_now` when only a commit can make room.

A crash between numbering and logging is harmless: the batch is composed again from the bodies, which Redis holds until the
commit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from services.buffer.batch_log import BatchLog
from services.buffer.cursor import TaskCursor
from services.buffer.front import Front, shielded
from services.buffer.ledger import Incarnation, Numbering, Rebuilt
from services.buffer.sentences import batch_sentence
from slipstream import logs, rpc
from slipstream.errors import Fenced, NotFound, OutOfRange
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2, batches_pb2_grpc

log = logs.get("buffer")


class BatchServicer(batches_pb2_grpc.BatchServiceServicer):
    def __init__(self, front: Front, store: ObjectStore, cursor: TaskCursor) -> None:
        self._front, self._store, self._cursor = front, store, cursor
        self._log = BatchLog(store, front.ledger.rules.run, front.ledger.rules.seed)
        self._composing = asyncio.Lock()

    async def TakeIncarnation(
            self, request: batches_pb2.TakeIncarnationRequest, context: Any) -> batches_pb2.TakeIncarnationResponse:
        taken: Incarnation = await shielded(self._take(request.above, request.checkpoint_batch))
        log.info("incarnation taken", incarnation=taken.incarnation, checkpoint=request.checkpoint_batch)
        return batches_pb2.TakeIncarnationResponse(
            incarnation=taken.incarnation, ledger_epoch=taken.ledger_epoch, numbered_batch=taken.numbered_batch,
            committed_batch=taken.committed_batch, ledger_sequence=taken.ledger_sequence)

    async def _take(self, above: int, checkpoint_batch: int) -> Incarnation:
        try:
            return await self._front.ledger.take_incarnation(above, checkpoint_batch)
        except Fenced as error:
            if error.reason != "LEDGER_BEHIND":
                raise
            await self._rebuild(checkpoint_batch, int(error.metadata["epoch"]))
            return await self._front.ledger.take_incarnation(above, checkpoint_batch)

    async def _rebuild(self, checkpoint_batch: int, seen_epoch: int) -> None:
        """The ledger was lost or rewound: start a new epoch behind the checkpoint and the batch log."""
        numbered = await self._log.newest()
        if numbered < checkpoint_batch:
            raise Fenced(
                f"the checkpoint is at batch {checkpoint_batch}, the ledger is behind it and the batch log ends at {numbered}: "
                "restore Redis or the object store, or start a new run.name", "LEDGER_LOST")
        rules = self._front.ledger.rules
        if rules.pinned:
            next_draw = numbered * rules.groups_per_batch
        else:
            headers = [await self._log.header(k) for k in range(max(1, numbered - rules.max_lag), numbered + 1)]
            draws = [g.draw.number for h in headers for g in h.groups] + [d.draw.number for h in headers for d in h.drops]
            next_draw = max(draws, default=-1) + 1
        keys = await self._store.list("versions/")
        version = max((int(key.split("/")[1].split("-")[0]) for key in keys), default=0)
        log.warning(
            "the ledger is behind the checkpoint and is rebuilt from the batch log: unfinished draws are lost",
            checkpoint=checkpoint_batch, numbered=numbered, next_draw=next_draw)
        cursor = await asyncio.to_thread(self._cursor.counts_before, next_draw)
        await self._front.ledger.rebuild(Rebuilt(seen_epoch, numbered, checkpoint_batch, next_draw, version, cursor))

    async def LeaseBatch(self, request: batches_pb2.LeaseBatchRequest, context: Any) -> batches_pb2.LeaseBatchResponse:
        front = self._front
        front.hear("trainer", "trainer")

        async def attempt() -> Numbering:
            numbering = await front.ledger.number_batch(request.incarnation, request.batch)
            if numbering.waiting:
                front.waiting["trainer"] = batch_sentence(numbering.waiting)
            return numbering

        numbering = await front.changes.poll(
            "ready", rpc.seconds(request.wait), attempt, lambda n: n.numbered or n.finished or n.checkpoint_now)
        response = batches_pb2.LeaseBatchResponse(finished=numbering.finished, checkpoint_now=numbering.checkpoint_now)
        if numbering.waiting:
            response.waiting_for = batch_sentence(numbering.waiting)
        if numbering.numbered:
            front.waiting.pop("trainer", None)
            response.batch.CopyFrom(await shielded(self._logged(request.batch)))
        return response

    async def _logged(self, batch: int) -> batches_pb2.Batch:
        """The composition, durable in the batch log."""
        async with self._composing:
            if (known := self._log.known(batch)) is not None:
                return known
            try:
                composition = await self._front.ledger.read_batch(batch)
            except OutOfRange:  # known from the log alone: the ledger was rebuilt
                return await self._log.header(batch)
            return await self._log.write(composition)

    async def ReadBatch(
            self, request: batches_pb2.ReadBatchRequest, context: Any) -> AsyncIterator[batches_pb2.ReadBatchResponse]:
        try:
            async for message in self._log.read(request.batch, request.samples):
                yield message
        except NotFound as error:
            if error.reason == "NO_MEMBER":
                raise
            raise NotFound(
                f"batch {request.batch} is not in the batch log; lease it first", "NO_BATCH", batch=request.batch) from None

    async def CommitBatches(
            self, request: batches_pb2.CommitBatchesRequest, context: Any) -> batches_pb2.CommitBatchesResponse:
        committed = await shielded(self._commit(request))
        return batches_pb2.CommitBatchesResponse(committed_batch=committed)

    async def _commit(self, request: batches_pb2.CommitBatchesRequest) -> int:
        ledger = self._front.ledger
        committed = await ledger.commit(request.incarnation, request.through_batch)
        if lines := await ledger.archive():
            meta = (await ledger.balance()).meta
            text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
            await self._store.put(f"ledger/{meta['epoch']:03d}-{meta['sequence']:012d}.jsonl", text.encode())
            await ledger.trim(lines)
        log.info("committed", batch=committed, checkpoint=request.checkpoint_key)
        return committed
