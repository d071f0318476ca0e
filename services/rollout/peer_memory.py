"""Ranges that this worker offers to others: each is read once for all who ask at the same time, and kept up to a bound.

consumes      ranges that were checked    produces: them again
waits for     whoever reads a range    unblocked by: the end of that read

What is kept is the very object that the tensors of a version lie in, so while that is being read, or is loaded, offering it
costs nothing and is not counted: all of a large version stays on offer until every worker has it. Of the rest, what was used
longest ago makes room.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from slipstream.errors import Exhausted

READS = 8  # on behalf of others, at once

Found = tuple[bytes, int | None]  # as RangeReader has it
Read = Callable[[], Awaitable[Found]]


class PeerMemory:
    """Bytes by the name of a plain range. `most_bytes`: kept for others alone, and being read for them, together."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Found]] = {}
        self._turns = asyncio.Semaphore(READS)
        self._reserved = 0
        self._since = 0  # bytes that came since the last look at what is kept for others alone

    @property
    def bytes(self) -> int:
        """Kept for others alone."""
        return sum(len(self._held[name]) for name in self._held if not _lent(self._held, name))

    def held(self, name: str) -> bytes | None:
        """The bytes, when they are here."""
        data = self._held.get(name)
        if data is not None:
            self._held.move_to_end(name)
        return data

    def keep(self, name: str, data: bytes) -> None:
        """Keep right bytes. More than `most_bytes` are forgotten at the next `trim`."""
        if name not in self._held:
            self._held[name] = data
            self._since += len(data)
            if self._since > self._most // 8:
                self.trim()

    def trim(self) -> None:
        """Forget what was used longest ago of what nobody else holds, until the rest is within its bound."""
        self._made_room(0)

    async def own(self, name: str, read: Read, keep: bool) -> Found:
        """Read for this worker itself, or join a read that goes on already."""
        if (data := self.held(name)) is not None:
            return data, None
        return await asyncio.shield(self._reading.get(name) or self._begin(name, read, keep))

    def for_others(self, name: str, size: int, read: Read, keep: bool) -> tuple[str, asyncio.Task[Found]]:
        """The read that goes on, or a new one ("joined" or "miss"). Raises Exhausted when its bytes do not fit."""
        if (task := self._reading.get(name)) is not None:
            return "joined", task
        if not self._made_room(size):
            raise Exhausted(
                f"{size} bytes do not fit beside {self._reserved} that are being read for others: raise "
                f"objects.near.peer_bytes = {self._most}", "PEER_BYTES", retry_s=1)
        self._reserved += size

        async def in_turn() -> Found:
            try:
                async with self._turns:
                    return await read()
            finally:
                self._reserved -= size

        return "miss", self._begin(name, in_turn, keep)

    async def close(self) -> None:
        """End what is being read."""
        reading = list(self._reading.values())
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    def _begin(self, name: str, read: Read, keep: bool) -> asyncio.Task[Found]:
        async def kept() -> Found:
            data, wrong = await read()
            if wrong is None and keep:
                self.keep(name, data)
            return data, wrong

        task = self._reading[name] = asyncio.create_task(kept(), name=f"read range {name[:12]}")
        task.add_done_callback(lambda done: self._ended(name, done))
        return task

    def _ended(self, name: str, task: asyncio.Task[Found]) -> None:
        self._reading.pop(name, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it; when nobody does, it is nobody's

    def _made_room(self, size: int) -> bool:
        """Forget what was used longest ago until `size` more bytes fit; nothing when they never would."""
        if self._reserved + size > self._most:
            return False
        over = self.bytes + self._reserved + size - self._most
        for name in list(self._held) if over > 0 else ():
            if over > 0 and not _lent(self._held, name):
                over -= len(self._held.pop(name))
        self._since = 0
        return True


def _lent(held: OrderedDict[str, bytes], name: str) -> bool:
    """Whether somebody else refers to these bytes: views of tensors do."""
    return _references(held, name) > _ALONE


def _references(held: OrderedDict[str, bytes], name: str) -> int:
    return sys.getrefcount(held[name])


def _alone() -> int:
    """What `_references` says of bytes that nobody else holds; it is the interpreter's own."""
    held = OrderedDict(a=bytes(bytearray(64)))
    return _references(held, "a")


_ALONE = _alone()
