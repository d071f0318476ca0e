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

import google_crc32c

from slipstream.errors import InvalidInput, OutOfRange
from slipstream.objects import ObjectStore, Piece

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


async def read_entries(store: ObjectStore, entries: Sequence[TensorEntry], what: str) -> list[RawTensor]:
    """Tensors wherever they lie, in the order of `entries`; neighbours are fetched together. `what` is for messages.

    Raises NotFound when an object is missing, InvalidInput (TENSOR_CHECKSUM, TENSOR_RANGE) when bytes are wrong.
    """
    readers = asyncio.Semaphore(READERS)

    async def fetch(some: list[TensorEntry]) -> list[RawTensor]:
        async with readers:
            first, last = some[0], some[-1]
            size = last.offset + last.size - first.offset
            try:
                data = memoryview(await store.get(first.key, first.offset, size))
            except OutOfRange as error:
                raise InvalidInput(f"{what}: {error.message}", "TENSOR_RANGE", key=first.key) from None
            if size < READ_BYTES // 8:
                return _checked(what, some, data)
            return await asyncio.to_thread(_checked, what, some, data)

    parts = await asyncio.gather(*(fetch(some) for some in _ranges(entries)))
    return [tensor for part in parts for tensor in part]


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


def checksum(data: Piece) -> int:
    """CRC-32C of any buffer. google_crc32c takes only `bytes`: larger buffers go through it in cache-sized copies."""
    if isinstance(data, bytes):
        return google_crc32c.value(data)
    view, crc = memoryview(data).cast("B"), 0
    for start in range(0, len(view), 1 << 18):
        crc = google_crc32c.extend(crc, bytes(view[start : start + (1 << 18)]))
    return crc


def _ranges(tensors: Sequence[TensorEntry]) -> list[list[TensorEntry]]:
    """Neighbours in one object, joined up to READ_BYTES."""
    ranges: list[list[TensorEntry]] = []
    for t in tensors:
        last = ranges[-1][-1] if ranges else None
        joined = last is not None and last.key == t.key and last.offset + last.size == t.offset
        if joined and t.offset + t.size - ranges[-1][0].offset <= READ_BYTES:
            ranges[-1].append(t)
        else:
            ranges.append([t])
    return ranges


def _checked(what: str, entries: Sequence[TensorEntry], data: memoryview) -> list[RawTensor]:
    """Cut one fetched range into tensors and compare their checksums."""
    tensors = []
    for e in entries:
        part = data[e.offset - entries[0].offset :][: e.size]
        if not e.patched and checksum(part) != e.crc32c:  # a patch is judged by what it rebuilds
            raise InvalidInput(
                f"{what}: tensor {e.name} ({e.key}, bytes {e.offset} to {e.offset + e.size}) is damaged",
                "TENSOR_CHECKSUM", key=e.key, tensor=e.name)
        tensors.append(RawTensor(e.name, e.dtype, e.shape, part))
    return tensors
