"""Hop 5: weights become a policy version: reserve a number, write tensors and manifest, then tell.

Consumes: snapshots of the weights. Produces: objects below versions/, and the version event of the buffer.
Waits for: the former publication, so that versions appear in the order of their steps. Unblocked by: object store and buffer.
The optimizer's next step runs meanwhile; at most one publication is in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.trainer.chain import Chain
from slipstream import logs, rpc
from slipstream.errors import SlipstreamError
from slipstream.manifest import (
    FileEntry,
    Manifest,
    RawTensor,
    delete_version,
    read_manifest,
    weights_hash,
    write_base,
    write_version,
)
from slipstream.probes import Probes
from slipstream.protos.buffer.v1 import policy_pb2 as events_pb2
from slipstream.protos.buffer.v1 import policy_pb2_grpc
from slipstream.protos.types.v1 import policy_pb2
from slipstream.service import ServiceContext

RPC_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 600.0
ORPHANS_S = 600.0  # since the start; longer than a reader holds a version that it will never be told of again
Writing = tuple[int, Sequence[RawTensor], Probes | None]  # step, weights, probes

log = logs.get("trainer.publish")


class Publisher:
    """Publishes the versions of one incarnation. `files` are those of every version.

    `record(version, hash of its weights)` is told of each before anybody else: it outlives the version. `base`: the weights
    that they go on from, when they are adapters; written before the first.
    """

    def __init__(
        self, context: ServiceContext, incarnation: int, files: Mapping[str, bytes], observe_s: Callable[[float], None],
        record: Callable[[policy_pb2.PolicyVersion, str], None] = lambda version, weights: None,
        base: Sequence[RawTensor] = (),
    ) -> None:
        self._context, self._incarnation, self._files, self._observe_s = context, incarnation, files, observe_s
        self._record, self._base = record, base
        self._base_written: FileEntry | None = None
        self._store, self._waits, self._clock = context.store, context.waits, context.clock
        self._stub: Any = policy_pb2_grpc.PolicyServiceStub(context.channel)
        self._task: asyncio.Task[None] | None = None
        self._chain: Chain | None = None
        self._reserved: dict[int, int] = {}  # step -> number: of the next version, with the announcement of the one before
        self._orphans_from = self._clock.monotonic() + ORPHANS_S

    @property
    def newest(self) -> int:
        """Number of the newest version announced; 0 before the first."""
        return self._context.policy_version.number if self._context.policy_version else 0

    async def submit(self, step: int, tensors: Sequence[RawTensor], probes: Probes | None = None) -> None:
        """Publish in the background, once the former publication is done. Raises what that one raised."""
        await self.drain()
        self._task = self._context.lifecycle.spawn(f"publish step {step}", self._publish(step, tensors, probes), endless=False)

    async def drain(self) -> None:
        """Wait for the publication in flight."""
        if self._task is not None:
            with self._waits.on("the former policy version to be published"):
                await self._task

    async def _publish(self, step: int, tensors: Sequence[RawTensor], probes: Probes | None) -> None:
        started = self._clock.monotonic()
        if self._chain is None:
            known: events_pb2.ListVersionsResponse = await rpc.call_until(
                self._stub.ListVersions, events_pb2.ListVersionsRequest(), RPC_TIMEOUT_S, self._waits, "the list of versions",
                self._clock)
            settings = self._context.run
            self._chain = Chain(self._store, settings.run.name, settings.trainer.full_every, known.versions)
        version, manifest = await rpc.call_until(
            self._write, (step, tensors, probes), WRITE_TIMEOUT_S, self._waits, f"writing the policy version of step {step}",
            self._clock)
        self._record(version, weights_hash(manifest.tensors))
        reply: events_pb2.PublishVersionResponse = await rpc.call_until(
            self._stub.PublishVersion,
            events_pb2.PublishVersionRequest(version=version, next_step=step + self._context.run.trainer.publish_every),
            RPC_TIMEOUT_S, self._waits, f"announcing the policy version of step {step}", self._clock)
        self._reserved = {step + self._context.run.trainer.publish_every: reply.next_number}
        self._context.policy_version = version
        self._observe_s(self._clock.monotonic() - started)
        await self._find_orphans(self._chain, version.number)
        for old in await self._chain.published(version, manifest, tensors, reply.deletable):
            try:
                await delete_version(self._store, old)
            except SlipstreamError as error:
                log.warning(f"version {old.number} could not be deleted: {error.message}", version=old.number)

    async def _find_orphans(self, chain: Chain, before: int) -> None:
        """Once: what a trainer that died left in the store."""
        if self._clock.monotonic() < self._orphans_from:
            return
        try:
            await chain.give_up_orphans(before)
            self._orphans_from = float("inf")
        except SlipstreamError as error:  # the next publication tries again
            log.warning(f"versions of a former trainer could not be looked for: {error.message}")

    async def _write(self, request: Writing, timeout: float) -> tuple[policy_pb2.PolicyVersion, Manifest]:
        """One try under a number of its own: an interrupted one leaves a gap, never a half-written version.

        The manifest is read back, so what it says is of the bytes that were written.
        """
        step, tensors, probes = request
        async with asyncio.timeout(timeout):
            if self._base and self._base_written is None:
                self._base_written = await write_base(self._store, self._base)
            number = self._reserved.pop(step, 0) or await self._reserve(step)
            version = await write_version(
                self._store, run=self._context.run.run.name, number=number, step=step, incarnation=self._incarnation,
                tensors=tensors, files=self._files, base=self._base_written, probes=probes,
                parent=self._chain.parent if self._chain else None)
            return version, await read_manifest(self._store, version)

    async def _reserve(self, step: int) -> int:
        request = events_pb2.ReserveVersionRequest(incarnation=self._incarnation, step=step)
        reserved: events_pb2.ReserveVersionResponse = await rpc.call(self._stub.ReserveVersion, request, RPC_TIMEOUT_S)
        return reserved.number
