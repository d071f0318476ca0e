"""Hop 7 of the walk: policy versions, from the event to the engine.

consumes: version events (buffer, WatchVersions; ListVersions as the backup)    produces: an engine that serves a version
waits for: a newer version, or a pinned one that is wanted; the samples in flight, before a pinned swap; the object store
unblocked by: a publication, `want`; the last sample's end; the store's return

Events are hints. A version is fetched and verified, manifest and every byte range, while decoding goes on; only then is it
swapped in. Whatever fails leaves the old version serving and is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from services.rollout.engine import Engine
from services.rollout.near import Near, nearest
from slipstream import logs, rpc
from slipstream.errors import ConfigError, InvalidInput, NotFound, SlipstreamError, Unavailable, from_rpc_error
from slipstream.lifecycle import CLOSE
from slipstream.manifest import FileEntry, Held, Manifest, RawTensor, read_complete, read_files, read_manifest, read_tensors
from slipstream.probes import Probes
from slipstream.protos.buffer.v1 import policy_pb2 as pb
from slipstream.protos.buffer.v1.policy_pb2_grpc import PolicyServiceStub
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.service import ServiceContext
from slipstream.telemetry import RolloutMetrics

POLL_S = 10.0
RETRY_S, RETRY_MOST_S = 0.5, 15.0
HOLD_S = 120.0
HOLD_AFTER_S = 0.2  # of reading: a small version is there sooner than the buffer could answer
CALL_S = 10.0

log = logs.get("rollout")


class Weights:
    """Keeps the engine on the newest version, or on the one that `want` names when the schedule is pinned.

    `before_swap` is awaited between fetching and swapping; `changed` is called after a swap.
    """

    def __init__(
        self, context: ServiceContext, engine: Engine, metrics: RolloutMetrics, before_swap: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._engine, self._metrics = context, engine, metrics
        self._before_swap, self._changed = before_swap, changed
        self._policy = PolicyServiceStub(context.channel)
        self._source = nearest(context, metrics)
        self.serving: list[rpc.Registration] = []  # what other workers ask of this one
        if isinstance(self._source, Near):
            context.lifecycle.on_stop(CLOSE, self._source.close, "places of versions")
            self.serving = self._source.serving
        self._pinned = context.run.schedule.pinned
        self._news = asyncio.Event()
        self.newest: PolicyVersion | None = None
        self._wanted: PolicyVersion | None = None
        self.swapping = False
        self._base: FileEntry | None = None  # of the engine that runs
        self._held: Held | None = None  # what it runs: patches go on from there

    def start(self) -> None:
        """Spawn the loops."""
        spawn = self._context.lifecycle.spawn
        spawn("watch versions", self._watch())
        spawn("poll versions", self._poll())
        spawn("load versions", self._follow())

    def note(self, version: PolicyVersion) -> None:
        """A version exists, whoever says so."""
        if version.number and (self.newest is None or version.number > self.newest.number):
            self.newest = version
            self._news.set()

    def want(self, version: PolicyVersion) -> None:
        """Pinned schedule: load exactly this version, older ones included."""
        self.note(version)
        if self._wanted is None or self._wanted.number != version.number:
            self._wanted = version
            self._news.set()

    async def _watch(self) -> None:
        while True:
            request = pb.WatchVersionsRequest(after=self.newest.number if self.newest else 0)
            try:
                async for response in self._policy.WatchVersions(request):
                    self.note(response.version)
            except grpc.aio.AioRpcError as error:
                told = from_rpc_error(error)
                if not isinstance(told, Unavailable):
                    raise told from None
            await self._context.clock.sleep(RETRY_S)

    async def _poll(self) -> None:
        context = self._context
        while True:
            response = await rpc.call_until(
                self._policy.ListVersions, pb.ListVersionsRequest(limit=1), CALL_S, context.waits, "buffer: list of versions",
                context.clock)
            for version in response.versions:
                self.note(version)
            await context.clock.sleep(POLL_S)

    async def _follow(self) -> None:
        context, failures = self._context, 0
        while True:
            await self._news_of_work()
            target = self._target()
            assert target is not None
            try:
                await self._load(target)
                failures = 0
            except SlipstreamError as error:
                self._failed(target, error)
                with context.waits.on(f"policy version {target.number}: {error.message}"):
                    await self._pause(min(RETRY_S * 2**failures, RETRY_MOST_S))
                failures = min(failures + 1, 16)

    async def _news_of_work(self) -> None:
        """Until there is a version to load; the wait shows only while nothing is loaded."""
        while self._target() is None:
            self._news.clear()
            if self._engine.version is None:
                with self._context.waits.on("first policy version from the trainer", patient=True):
                    await self._news.wait()
            else:
                await self._news.wait()

    async def _pause(self, seconds: float) -> None:
        """Until the time is over or another version is known."""
        self._news.clear()
        ends = {asyncio.ensure_future(self._context.clock.sleep(seconds)), asyncio.ensure_future(self._news.wait())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def _target(self) -> PolicyVersion | None:
        loaded = self._engine.version
        target = self._wanted if self._pinned and self._wanted is not None else self.newest
        if self._pinned and self._wanted is None and loaded is not None:
            return None
        return None if target is None or (loaded is not None and loaded.number == target.number) else target

    async def _load(self, version: PolicyVersion) -> None:
        started = time.perf_counter()
        manifest, tensors = await self._fetch(version)
        self._metrics.fetch_seconds.observe(time.perf_counter() - started)
        if self._engine.version is None:
            await self._first(manifest, tensors, version)
        else:
            await self._before_swap()
            started, self.swapping = time.perf_counter(), True
            try:
                await self._engine.swap(version, tensors, self._canary(manifest))
            finally:
                self.swapping = False
            self._metrics.swap_seconds.observe(time.perf_counter() - started)
        if manifest.base is None:
            self._held = Held(version, tensors, manifest.full)
        if isinstance(self._source, Near):
            self._source.settle()
        self._metrics.swaps.labels("loaded").inc()
        self._metrics.loaded_step.set(version.step)
        self._metrics.policy_version.set(version.number)
        self._context.policy_version = version
        log.info("policy version loaded", version=version.number, step=version.step, incarnation=version.incarnation)
        self._changed()

    async def _fetch(self, version: PolicyVersion) -> tuple[Manifest, Sequence[RawTensor]]:
        """Read it, verify it; hold it when that takes a while. The newest two are never deleted, others are read again."""
        context = self._context
        reading = asyncio.ensure_future(self._read(version))
        try:
            if not (await asyncio.wait({reading}, timeout=HOLD_AFTER_S))[0]:
                hold = pb.HoldVersionRequest(
                    version=version.number, reader=context.arguments.instance, ttl=rpc.duration(HOLD_S))
                await rpc.call_until(
                    self._policy.HoldVersion, hold, CALL_S, context.waits, f"buffer: hold of version {version.number}",
                    context.clock)
            return await reading
        finally:
            reading.cancel()

    async def _read(self, version: PolicyVersion) -> tuple[Manifest, Sequence[RawTensor]]:
        context = self._context
        manifest = await read_manifest(self._source, version, context.run.run.name)
        if self._engine.version is None:
            return manifest, await read_complete(self._source, manifest)
        if manifest.base != self._base:
            raise InvalidInput(
                f"version {version.number} goes on from {manifest.base and manifest.base.key}, this engine was started on "
                f"{self._base and self._base.key}: start the worker again", "BASE", version=version.number)
        return manifest, await read_tensors(self._source, manifest, self._held)

    def _canary(self, manifest: Manifest) -> Probes | None:
        return manifest.probes if self._context.run.rollout.canary else None

    async def _first(self, manifest: Manifest, tensors: Sequence[RawTensor], version: PolicyVersion) -> None:
        """Build the engine. A model that it cannot run is a matter of configuration: starting again does not help."""
        files = await read_files(self._source, manifest)
        try:
            with self._context.waits.on(f"engine: building the model of version {version.number}"):
                await self._engine.start(files, tensors, version, self._canary(manifest))
            self._base = manifest.base
        except InvalidInput as error:
            raise ConfigError(error.message, error.reason) from error

    def _failed(self, version: PolicyVersion, error: SlipstreamError) -> None:
        if isinstance(error, ConfigError):
            raise error
        refused = isinstance(error, InvalidInput) and not isinstance(error, NotFound)
        self._metrics.swaps.labels("canary" if error.reason == "CANARY" else "refused" if refused else "failed").inc()
        log.warning(
            "policy version not loaded, the old one serves on", version=version.number, step=version.step, reason=error.reason,
            error=error.message)
        if isinstance(error, NotFound) and not self._pinned and self.newest and self.newest.number == version.number:
            self.newest = self._engine.version  # deleted meanwhile: the next event or poll names one that exists
