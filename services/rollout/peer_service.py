"""This worker as its peers see it: ranges from memory, or read for all who ask at once. Proto in and out.

Consumes: ReadRange calls of other workers. Produces: bytes that were checked. Waits for: the node's folder, the weight server,
the store, never another worker's wait. Unblocked by: their answers, or their time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Protocol

from services.rollout.peer_memory import Found, PeerMemory
from services.rollout.peers import Peers, beating
from slipstream.errors import Exhausted, InvalidInput, NotFound, Unavailable
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.range_calls import PREFIXES, covered, frames, range_of
from slipstream.ranges import Range
from slipstream.telemetry import RolloutMetrics

CALLS = 128  # at once: 32 workers with four reads each


class Places(Protocol):
    """Where this worker has ranges from, for others."""

    async def through(self, wanted: Range) -> Found:
        """From everywhere but another worker's own wait. Raises what the store raises."""
        ...

    async def kept(self, wanted: Range) -> bytes | None:
        """From the node's folder, at once."""
        ...


class PeerServicer:
    """slipstream.weights.v1.WeightService of a rollout worker."""

    def __init__(
        self, run: str, memory: PeerMemory, peers: Peers, places: Places, stopping: asyncio.Event, metrics: RolloutMetrics,
    ) -> None:
        self._run, self._memory, self._peers, self._places = run, memory, peers, places
        self._stopping, self._metrics = stopping, metrics
        self._calls = 0

    async def ReadRange(self, request: pb.ReadRangeRequest, context: Any) -> AsyncIterator[bytes]:
        wanted = range_of(request)
        try:
            self._admit(request, wanted)
            data = self._memory.held(wanted.name)
            if data is None and request.held and (data := await self._places.kept(wanted)) is None:
                raise NotFound(f"{wanted.key}: this worker does not hold the range", "HELD", key=wanted.key)
            outcome, task = ("hit", None) if data is not None else self._begin(wanted)
        except (InvalidInput, Unavailable) as error:
            self._metrics.peer_reads.labels("absent" if isinstance(error, NotFound) else "refused").inc()
            raise
        self._metrics.peer_reads.labels(outcome).inc()
        self._calls += 1
        try:
            if task is not None:
                async with contextlib.aclosing(beating(task)) as beats:
                    async for _ in beats:
                        yield b""
                data, wrong = task.result()
                if wrong is not None:
                    raise Unavailable(f"{wanted.key}: the object store gave other bytes than were published", "DAMAGED")
            assert data is not None
            for frame in frames(data):
                yield frame
                self._metrics.peer_bytes.inc(len(frame))
        finally:
            self._calls -= 1

    def _admit(self, request: pb.ReadRangeRequest, wanted: Range) -> None:
        """Raises InvalidInput, NotFound (RUN), Exhausted or Unavailable (DRAINING)."""
        if self._stopping.is_set():
            raise Unavailable("this worker stops", "DRAINING")
        if request.run != self._run:
            raise NotFound(f"this worker is of run {self._run!r}, not of {request.run!r}", "RUN", run=self._run)
        if not wanted.key.startswith(PREFIXES):
            raise InvalidInput(
                f"key {wanted.key[:80]!r} is not below one of {', '.join(PREFIXES)}: only what never changes is served", "KEY",
                key=wanted.key[:80])
        if not covered(wanted):
            raise InvalidInput(
                f"{wanted.key}: checks leave bytes of the range out: ask with the checksums of the manifest", "CHECKS",
                key=wanted.key)
        if self._calls >= CALLS:
            raise Exhausted(f"this worker answers {CALLS} others already", "CALLS", retry_s=1)

    def _begin(self, wanted: Range) -> tuple[str, asyncio.Task[Found]]:
        return self._memory.for_others(
            wanted.name, wanted.size or 0, lambda: self._places.through(wanted), self._peers.keeps(wanted.name))
