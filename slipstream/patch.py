"""Lossless element-sparse patches: a tensor as its difference from the same tensor one policy version earlier.

With a small learning rate an optimizer step moves few elements of a bfloat16 tensor, and those by one unit in the last place.
So a patch lists which elements changed (gaps between indices) and by how many ulps, each list entropy-coded: some ten bits per
changed element. It rebuilds the exact bits; whoever applies one checks the result against the checksum in the manifest.

Layout, little-endian: `<HIIIII` = width in bytes of an element, changed elements, then bytes of four zlib streams: gaps below
255, larger gaps, zigzag differences below 255, larger differences. A 255 in a byte stream stands for the next larger one.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from slipstream.errors import InvalidInput
from slipstream.objects import Piece

WIDTHS = {"F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # dtypes that can be patched, bytes per element
_HEAD = struct.Struct("<HIIIII")
_ESCAPE = 255
_MOST = 1 << 31  # elements of one patch: indices and gaps fit 32 bits


def encode(old: Piece, new: Piece, dtype: str, most: float = 1.0) -> bytes | None:
    """The patch that turns `old` into `new`, two tensors of `dtype` with equally many elements.

    None when it would not be a patch: a dtype without one, too many elements, or more than the share `most` of them changed.
    """
    if dtype not in WIDTHS or memoryview(old).nbytes != memoryview(new).nbytes:
        return None
    before, after = _bits(old, dtype), _bits(new, dtype)
    index = np.flatnonzero(before != after)
    if len(before) >= _MOST or len(index) > most * len(before):
        return None
    gaps = np.diff(index, prepend=-1).astype(np.uint64) - 1
    steps = _ordered(after[index]) - _ordered(before[index])  # wraps around, and so does its inverse
    zigzag = ((steps << 1) ^ (steps >> (8 * steps.itemsize - 1))).view(before.dtype)
    streams = [*_streams(gaps, np.uint32), *_streams(zigzag, before.dtype)]
    return _HEAD.pack(WIDTHS[dtype], len(index), *map(len, streams)) + b"".join(streams)


def decode(old: Piece, patch: Piece, dtype: str) -> bytes:
    """The tensor that `patch` was made for. Raises InvalidInput (PATCH) when the patch cannot belong to `old`."""
    before = _bits(old, dtype)
    try:
        width, count, *sizes = _HEAD.unpack_from(patch)
        if width != WIDTHS[dtype]:
            raise ValueError(f"elements of {width} bytes, not {WIDTHS[dtype]}")
        view, start, streams = memoryview(patch), _HEAD.size, []
        for size in sizes:
            streams.append(zlib.decompress(view[start:start + size]))
            start += size
        gaps = _values(streams[0], streams[1], np.dtype(np.uint32), count)
        zigzag = _values(streams[2], streams[3], before.dtype, count)
        index = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if start != view.nbytes or (count and index[-1] >= len(before)):
            raise ValueError("it does not end where it should")
    except (struct.error, zlib.error, ValueError, KeyError) as error:
        raise InvalidInput(f"a patch is damaged, or made for another tensor: {error}", "PATCH") from None
    signed = np.dtype(f"i{before.itemsize}")
    steps = (zigzag >> 1).view(signed) ^ -(zigzag & 1).view(signed)
    after = before.copy()
    after[index] = _unordered(_ordered(before[index]) + steps)
    return after.tobytes()


def _bits(data: Piece, dtype: str) -> np.ndarray:
    return np.frombuffer(data, f"<u{WIDTHS[dtype]}")


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Sign-and-magnitude bits as integers in which neighbouring floats differ by one; 0 and -0 are neighbours. Own inverse."""
    signed = bits.view(f"i{bits.itemsize}")
    return np.where(signed < 0, ~signed ^ np.iinfo(signed.dtype).min, signed)


def _unordered(values: np.ndarray) -> np.ndarray:
    return _ordered(values).view(f"u{values.itemsize}")


def _streams(values: np.ndarray, wide: np.typing.DTypeLike) -> tuple[bytes, bytes]:
    """Values as bytes with 255 for every larger one, and those."""
    large = values >= _ESCAPE
    return _coded(np.where(large, _ESCAPE, values).astype(np.uint8)), _coded(values[large].astype(wide))


def _values(small: bytes, large: bytes, wide: np.dtype, count: int) -> np.ndarray:
    values = np.frombuffer(small, np.uint8).astype(wide)
    if len(values) != count:
        raise ValueError(f"{len(values)} values instead of {count}")
    values[np.flatnonzero(values == _ESCAPE)] = np.frombuffer(large, wide)
    return values


def _coded(values: np.ndarray) -> bytes:
    """Huffman codes alone: matches between indices or ulps are chance."""
    coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(values.tobytes()) + coder.flush()
