"""The body of the plainest sample, written byte by byte: one answer to one prompt, as most are.

slipstream.sample.encode makes the same bytes through messages, and takes three times as long; of half a thousand small samples
a step that is felt, for the engine's thread waits for the interpreter meanwhile. What repeats from sample to sample (lengths,
spans) is remembered as bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from slipstream.protos.types.v1 import sample_pb2, tensor_pb2
from slipstream.sample import Span
from slipstream.sample_stream import varint

_ITEM_BYTES = 4
_varint = functools.lru_cache(4096)(varint)
_TOKENS, _RUNS, _LOGPROBS, _VERSIONS = b"\x0a", b"\x12", b"\x1a", b"\x22"  # tags of Segment
_SEGMENT = b"\x0a"  # of SampleBody
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


def encode(
    prompt: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, spans: Sequence[Span], finish_reason: int,
) -> bytes | None:
    """The body of a sample of one segment: `prompt`, then `tokens` with `logprobs`, [P], [M] and [M], from versions `spans`.

    None for arrays of other types than int32 and float32: encode can say what is wrong with those.
    """
    known, new = len(prompt), len(tokens)
    if prompt.dtype != _INT32 or tokens.dtype != _INT32 or logprobs.dtype != _FLOAT32 or len(logprobs) != new:
        return None
    segment = b"".join((
        _tensor(_TOKENS, tensor_pb2.DTYPE_INT32, known + new), prompt.tobytes(), tokens.tobytes(), _runs(known, new),
        _tensor(_LOGPROBS, tensor_pb2.DTYPE_FLOAT32, new), logprobs.tobytes(), *map(_version, spans)))
    return b"".join((_SEGMENT, _varint(len(segment)), segment, _finish(finish_reason)))


@functools.lru_cache(4096)
def _tensor(tag: bytes, dtype: int, count: int) -> bytes:
    """A Tensor field of so many numbers, up to where its data begins."""
    shape, size = _varint(count), count * _ITEM_BYTES
    head = b"".join((b"\x08", _varint(dtype), b"\x12", _varint(len(shape)), shape))
    if size:  # no bytes are no field
        head += b"\x1a" + _varint(size)
    return tag + _varint(len(head) + size) + head


@functools.lru_cache(4096)
def _runs(known: int, new: int) -> bytes:
    runs = _varint(known) + _varint(new)
    return _RUNS + _varint(len(runs)) + runs


@functools.lru_cache(4096)
def _version(span: Span) -> bytes:
    whole = sample_pb2.VersionSpan(
        version=span.version, step=span.step, incarnation=span.incarnation, length=span.length).SerializeToString()
    return _VERSIONS + _varint(len(whole)) + whole


@functools.lru_cache(16)
def _finish(reason: int) -> bytes:
    return sample_pb2.SampleBody(finish_reason=reason).SerializeToString()  # pyright: ignore[reportArgumentType]
