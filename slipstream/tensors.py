"""Tensors as bytes in objects: a safetensors object, where each tensor lies in it, and reading them back by their checksums.

Any tool opens such an object. https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InvalidInput, OutOfRange
from slipstream.objects import Piece
from slipstream.ranges import Range, RangeReader, Source, Span, read
from slipstream.ranges import checksum as checksum  # also known from here: of tensors

# Bytes per element, by safetensors' spelling.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}
READ_BYTES = 32 << 20  # neighbouring tensors are fetched together up to this
READERS = 4


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: row-major, little-endian. `dtype` in safetensors' spelling, such as "F32" or "BF16"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Piece

    @property
    def size(self) -> int:
        """Bytes that dtype and shape ask for."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [offset, offset + size) of the object `key`; as a patch of the parent's, if `patched`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    offset: int
    size: int
    crc32c: int  # of the whole tensor
    patched: bool = False
    stored_crc32c: int | None = None  # of a patch as it is stored; None in versions that were written without


async def read_entries(store: Source, entries: Sequence[TensorEntry], what: str) -> list[RawTensor]:
    """Tensors wherever they lie, in the order of `entries`; neighbours are fetched together. `what` is for messages.

    Raises NotFound when an object is missing, InvalidInput (TENSOR_CHECKSUM, TENSOR_RANGE) when bytes are wrong.
    """
    readers, near = asyncio.Semaphore(READERS), store if isinstance(store, RangeReader) else None
    ranges = _ranges(entries, near.portion(READ_BYTES) if near else READ_BYTES)
    order = await near.arranged([range_of(some) for some in ranges]) if near else range(len(ranges))

    async def fetch(some: list[TensorEntry]) -> list[RawTensor]:
        async with readers:
            try:
                data, wrong = await read(store, range_of(some))
            except OutOfRange as error:
                raise InvalidInput(f"{what}: {error.message}", "TENSOR_RANGE", key=some[0].key) from None
            if wrong is not None:
                e = some[wrong]
                raise InvalidInput(
                    f"{what}: tensor {e.name} ({e.key}, bytes {e.offset} to {e.offset + e.size}) is damaged",
                    "TENSOR_CHECKSUM", key=e.key, tensor=e.name)
            return _cut(some, memoryview(data))

    parts = dict(zip(order, await asyncio.gather(*(fetch(ranges[n]) for n in order)), strict=True))
    return [tensor for n in range(len(ranges)) for tensor in parts[n]]


def layout(
    tensors: Sequence[RawTensor], key: str, metadata: Mapping[str, str]
) -> tuple[bytes, list[RawTensor], list[TensorEntry]]:
    """Header of a safetensors object, its tensors in file order, and where each lies.

    Wide types first, so that every tensor is aligned to its element size; the header is padded with spaces to 8 bytes.
    https://huggingface.co/docs/safetensors/index#format
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_BYTES:
            raise InvalidInput(
                f"tensor {tensor.name}: dtype {tensor.dtype!r} is not one of {', '.join(DTYPE_BYTES)}", "TENSOR_DTYPE",
                tensor=tensor.name)
        if memoryview(tensor.data).nbytes != tensor.size:
            raise InvalidInput(
                f"tensor {tensor.name}: {memoryview(tensor.data).nbytes} bytes are not {tensor.dtype}{list(tensor.shape)}",
                "TENSOR_SHAPE", tensor=tensor.name)
    ordered = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name))
    if duplicate := next((a.name for a, b in itertools.pairwise(ordered) if a.name == b.name), None):
        raise InvalidInput(f"tensor {duplicate} appears twice", "TENSOR_NAME", tensor=duplicate)
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in ordered:
        table[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.size]}
        offset += tensor.size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    entries = [
        TensorEntry(t.name, t.dtype, t.shape, key, len(header) + table[t.name]["data_offsets"][0], t.size, checksum(t.data))
        for t in ordered
    ]
    return header, ordered, entries


def _ranges(tensors: Sequence[TensorEntry], most: int) -> list[list[TensorEntry]]:
    """Neighbours in one object, joined up to `most` bytes."""
    ranges: list[list[TensorEntry]] = []
    for t in tensors:
        last = ranges[-1][-1] if ranges else None
        joined = last is not None and last.key == t.key and last.offset + last.size == t.offset
        if joined and t.offset + t.size - ranges[-1][0].offset <= most:
            ranges[-1].append(t)
        else:
            ranges.append([t])
    return ranges


def range_of(entries: Sequence[TensorEntry]) -> Range:
    """Neighbouring tensors as one range, a span for each. A patch without a checksum of its own is judged by what it
    rebuilds."""
    first, last = entries[0], entries[-1]
    spans = [Span(e.offset - first.offset, e.size, e.stored_crc32c if e.patched else e.crc32c) for e in entries]
    return Range(first.key, first.offset, last.offset + last.size - first.offset, tuple(spans))


def _cut(entries: Sequence[TensorEntry], data: memoryview) -> list[RawTensor]:
    """One fetched range as its tensors, sharing its memory."""
    start = entries[0].offset
    return [RawTensor(e.name, e.dtype, e.shape, data[e.offset - start : e.offset - start + e.size]) for e in entries]
