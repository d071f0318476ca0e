"""Byte ranges with their checksums: what readers of policy versions ask for, and whom they ask.

A range names what it is to hold, so it can be taken from anywhere: from an object store as it is, or from a `RangeReader`,
which looks in nearer places first and believes none of them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import google_crc32c

from slipstream.objects import ObjectStore, Piece

INLINE_BYTES = 4 << 20  # checked in the event loop up to this size


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [offset, offset + size) of a range, to its end without a size, and their CRC-32C; None when nobody knows it."""

    offset: int
    size: int | None
    crc32c: int | None


@dataclass(frozen=True)
class Range:
    """Bytes [offset, offset + size) of an immutable object, to its end without a size. `spans` cover what is checked."""

    key: str
    offset: int
    size: int | None
    spans: tuple[Span, ...]

    @functools.cached_property
    def name(self) -> str:
        """Identifies place and contents, whoever asks: SHA-256 over all of it."""
        said = [self.key, self.offset, self.size, *((s.offset, s.size, s.crc32c) for s in self.spans)]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    @property
    def checked(self) -> bool:
        """Whether wrong bytes would be noticed."""
        return all(span.crc32c is not None for span in self.spans)

    def damaged(self, data: Piece) -> int | None:
        """Index of the first span that `data` does not hold; None when all is well."""
        view = memoryview(data)
        for i, span in enumerate(self.spans):
            part = view[span.offset :] if span.size is None else view[span.offset : span.offset + span.size]
            short = span.size is not None and len(part) != span.size
            if short or (span.crc32c is not None and checksum(part) != span.crc32c):
                return i
        return None if self.size is None or len(view) == self.size else len(self.spans) - 1

    async def judge(self, data: Piece) -> int | None:
        """`damaged`, beside the event loop when it takes long."""
        return self.damaged(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(self.damaged, data)


@runtime_checkable
class RangeReader(Protocol):
    """Reads ranges from wherever they are. Raises what an object store's `get` raises."""

    async def read_range(self, wanted: Range) -> tuple[bytes, int | None]:
        """The bytes, and the index of the first span that is wrong even in the object store; None when all are right."""
        ...

    def portion(self, most: int) -> int:
        """Most bytes of neighbours to ask for as one range, where an object store would be asked for `most`."""
        ...

    async def arranged(self, ranges: Sequence[Range]) -> Sequence[int]:
        """In which order to ask for several: their indices."""
        ...


Source: TypeAlias = "ObjectStore | RangeReader"


async def read(source: Source, wanted: Range) -> tuple[bytes, int | None]:
    """See RangeReader. Raises NotFound, OutOfRange, Unavailable."""
    if isinstance(source, RangeReader):
        return await source.read_range(wanted)
    data = await source.get(wanted.key, wanted.offset, wanted.size)
    return data, await wanted.judge(data)


async def read_whole(source: Source, key: str, crc32c: int) -> tuple[bytes, bool]:
    """A whole object, and whether it has this checksum. Raises NotFound, Unavailable."""
    data, wrong = await read(source, Range(key, 0, None, (Span(0, None, crc32c),)))
    return data, wrong is None


def checksum(data: Piece) -> int:
    """CRC-32C of any buffer. google_crc32c takes only `bytes`: larger buffers go through it in cache-sized copies."""
    if isinstance(data, bytes):
        return google_crc32c.value(data)
    view, crc = memoryview(data).cast("B"), 0
    for start in range(0, len(view), 1 << 18):
        crc = google_crc32c.extend(crc, bytes(view[start : start + (1 << 18)]))
    return crc
