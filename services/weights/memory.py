"""Byte ranges of the object store in memory: each is read once, however many ask, and at most so many bytes are held.

consumes      ranges of immutable objects, and what they are to hold    produces: them, as messages that are ready to be sent
waits for     the object store    unblocked by: its answer

A range that several ask for at once is one read, which goes on when those who asked are gone. What was used longest ago makes
room; a read reserves its room before it starts, twice, because the bytes are copied once. What differs from its checksums is
not kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from slipstream.errors import Exhausted, InvalidInput, Unavailable
from slipstream.objects import ObjectStore
from slipstream.range_calls import PREFIXES, Frames
from slipstream.range_calls import frames as framed
from slipstream.ranges import Range
from slipstream.telemetry import WeightServerMetrics

Place = tuple[str, int, int]


class RangeMemory:
    """Frames by range. `most_bytes`: held and being read, together."""

    def __init__(self, store: ObjectStore, most_bytes: int, metrics: WeightServerMetrics) -> None:
        self._store, self._most, self._metrics = store, most_bytes, metrics
        self._held: OrderedDict[Place, Frames] = OrderedDict()
        self._reading: dict[Place, asyncio.Task[Frames]] = {}
        self._bytes = self._reserved = 0
        metrics.most_bytes.set(most_bytes)

    async def frames(self, wanted: Range) -> Frames:
        """Serialized ReadRangeResponses. Raises InvalidInput, NotFound, OutOfRange, Exhausted, Unavailable."""
        if not wanted.key.startswith(PREFIXES):
            raise InvalidInput(
                f"key {wanted.key[:80]!r} is not below one of {', '.join(PREFIXES)}: only what never changes is served", "KEY",
                key=wanted.key[:80])
        place = (wanted.key, wanted.offset, wanted.size or 0)
        held = self._held.get(place)
        if held is not None:
            self._held.move_to_end(place)
            self._metrics.reads.labels("hit").inc()
            return held
        task = self._reading.get(place)
        if task is None:
            self._metrics.reads.labels("miss").inc()
            task = asyncio.create_task(self._read(place, wanted), name=f"read {wanted.key}")
            self._reading[place] = task
            task.add_done_callback(lambda done: self._ended(place, done))
        else:
            self._metrics.reads.labels("joined").inc()
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what is being read."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, place: Place, wanted: Range) -> Frames:
        room = 2 * (wanted.size or 0)
        self._make_room(room)
        self._reserved += room
        try:
            data = await self._store.get(wanted.key, wanted.offset, wanted.size)
            self._metrics.store_bytes.inc(len(data))
            if await wanted.judge(data) is not None:
                self._metrics.reads.labels("damaged").inc()
                raise Unavailable(f"{wanted.key}: the object store gave other bytes than were published", "DAMAGED")
            frames = framed(data)
        finally:
            self._reserved -= room
        size = sum(map(len, frames))
        self._make_room(size)
        self._held[place] = frames
        self._add(size)
        return frames

    def _ended(self, place: Place, task: asyncio.Task[Frames]) -> None:
        self._reading.pop(place, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; when nobody does, it is nobody's

    def _make_room(self, size: int) -> None:
        """Forget what was used longest ago until `size` more bytes fit. Raises Exhausted when they never will, or not now."""
        while self._held and self._bytes + self._reserved + size > self._most:
            _, frames = self._held.popitem(last=False)
            self._add(-sum(map(len, frames)))
        if self._bytes + self._reserved + size > self._most:
            raise Exhausted(
                f"{size} bytes do not fit beside {self._reserved} that are being read: raise objects.near.server_bytes = "
                f"{self._most}", "SERVER_BYTES", retry_s=1)

    def _add(self, size: int) -> None:
        self._bytes += size
        self._metrics.bytes.set(self._bytes)
