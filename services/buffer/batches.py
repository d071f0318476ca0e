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
from collections.abc import AsyncIterator
from typing import Any

from services.buffer.archive import archive
from services.buffer.batch_log import BatchLog, diverged, same
from services.buffer.cursor import TaskCursor
from services.buffer.front import Front, shielded
from services.buffer.ledger import Numbering
from services.buffer.recovery import Recovery
from services.buffer.sentences import batch_sentence
from services.buffer.spill import Spill
from slipstream import logs, rpc
from slipstream.errors import NotFound
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import batches_pb2, batches_pb2_grpc

log = logs.get("buffer")


class BatchServicer(batches_pb2_grpc.BatchServiceServicer):
    def __init__(self, front: Front, store: ObjectStore, cursor: TaskCursor) -> None:
        self._front, self._store = front, store
        self._log = BatchLog(store, front.ledger.rules.run, front.ledger.rules.seed)
        self._recovery = Recovery(front.ledger, store, self._log, cursor, front.metrics)
        self._spill = Spill(front.ledger, store, front.metrics.spilled)
        self._composing = asyncio.Lock()

    async def TakeIncarnation(
            self, request: batches_pb2.TakeIncarnationRequest, context: Any) -> batches_pb2.TakeIncarnationResponse:
        taken = await shielded(self._recovery.take(request))
        log.info("incarnation taken", incarnation=taken.incarnation, checkpoint=request.checkpoint_batch)
        return batches_pb2.TakeIncarnationResponse(
            incarnation=taken.incarnation, ledger_epoch=taken.ledger_epoch, numbered_batch=taken.numbered_batch,
            committed_batch=taken.committed_batch, ledger_sequence=taken.ledger_sequence)

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
            response.batch.CopyFrom(await shielded(self._logged(request.batch, numbering)))
            response.bodies.extend(self._log.bodies(request.batch, request.bodies_up_to_bytes))
        return response

    async def _logged(self, batch: int, numbering: Numbering) -> batches_pb2.Batch:
        """The composition, durable in the batch log. Raises Fenced when the log has another: the ledger was rewound."""
        async with self._composing:
            if (known := self._log.known(batch)) is not None:
                if not same(known, numbering):
                    raise diverged(batch)
                return known
            if not numbering.sequence:  # known from the log alone: the ledger was rebuilt
                return await self._log.header(batch)
            return await self._log.write(await self._spill.whole(await self._front.ledger.read_batch(batch)))

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
        await archive(ledger, self._store)
        await self._spill.collect()
        log.info("committed", batch=committed, checkpoint=request.checkpoint_key)
        return committed
