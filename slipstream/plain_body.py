"""Bodies of one segment as `slipstream.sample.encode` makes them, written and read without messages.

Of half a thousand small samples a step that is felt: the threads that compute wait for the interpreter meanwhile. What repeats
from sample to sample (lengths, runs of the mask, spans) is remembered as bytes; the arrays stay where they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from slipstream.protos.types.v1 import sample_pb2, tensor_pb2

if TYPE_CHECKING:
    from slipstream.sample import Span

ITEM_BYTES = 4  # of a token and of a log-probability
_MOST_REMEMBERED = 256  # bytes of a part that is remembered; who has more goes the long way
# From the start to the data of the tokens, and from there to that of the log-probabilities. A tensor: its bytes, dtype, one
# dimension (bytes, number), bytes of the data.
_NUMBER = rb"([\x80-\xff]{0,4}[\x00-\x7f])"
_TENSOR = _NUMBER + rb"\x08([\x00-\x7f])\x12([\x01-\x05])" + _NUMBER + rb"\x1a" + _NUMBER
_TOKENS = re.compile(rb"\x0a" + _NUMBER + rb"\x0a" + _TENSOR)
_RUNS, _LOGPROBS = re.compile(rb"\x12" + _NUMBER), re.compile(rb"\x1a" + _TENSOR)
_TOKENS_TAG, _RUNS_TAG, _LOGPROBS_TAG, _VERSIONS_TAG = b"\x0a", b"\x12", b"\x1a", b"\x22"  # of Segment
_SEGMENT_TAG = b"\x0a"  # of SampleBody
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
        _tensor(_TOKENS_TAG, tensor_pb2.DTYPE_INT32, known + new), prompt.tobytes(), tokens.tobytes(), _runs(known, new),
        _tensor(_LOGPROBS_TAG, tensor_pb2.DTYPE_FLOAT32, new), logprobs.tobytes(), *map(_version, spans)))
    return b"".join((_SEGMENT_TAG, _varint(len(segment)), segment, _finish(finish_reason)))


@functools.lru_cache(4096)
def _tensor(tag: bytes, dtype: int, count: int) -> bytes:
    """A Tensor field of so many numbers, up to where its data begins."""
    shape, size = _varint(count), count * ITEM_BYTES
    head = b"".join((b"\x08", _varint(dtype), b"\x12", _varint(len(shape)), shape))
    if size:  # no bytes are no field
        head += b"\x1a" + _varint(size)
    return tag + _varint(len(head) + size) + head


@functools.lru_cache(4096)
def _runs(known: int, new: int) -> bytes:
    runs = _varint(known) + _varint(new)
    return _RUNS_TAG + _varint(len(runs)) + runs


@functools.lru_cache(4096)
def _version(span: Span) -> bytes:
    whole = sample_pb2.VersionSpan(
        version=span.version, step=span.step, incarnation=span.incarnation, length=span.length).SerializeToString()
    return _VERSIONS_TAG + _varint(len(whole)) + whole


@functools.lru_cache(16)
def _finish(reason: int) -> bytes:
    return sample_pb2.SampleBody(finish_reason=reason).SerializeToString()  # pyright: ignore[reportArgumentType]


class PlainBody(NamedTuple):
    """A body: `size` int32 tokens from byte `tokens_at` on, `generated` float32 log-probabilities from `logprobs_at` on."""

    tokens_at: int
    size: int
    logprobs_at: int
    generated: int
    runs: tuple[int, ...]  # of the loss mask
    spans: tuple[tuple[int, int, int, int], ...]  # version, step, incarnation, length
    turns: tuple[tuple[int, int], ...]  # turn, length
    finish_reason: int
    info_json: str


def read(body: bytes | memoryview) -> PlainBody | None:
    """None for a body of any other layout, well-formed or not. What the parts say of each other is not checked."""
    if (tokens := _TOKENS.match(body)) is None or (found := _counted(tokens[0])) is None:
        return None
    count, end = found  # of the segment
    tokens_at = tokens.end()
    runs_at = tokens_at + ITEM_BYTES * count
    if (runs := _RUNS.match(body, runs_at)) is None:
        return None
    runs_end = runs.end() + _number(runs[1])
    if runs_end - runs_at > _MOST_REMEMBERED or (logprobs := _LOGPROBS.match(body, runs_end)) is None:
        return None
    if (found := _counted(logprobs[0])) is None:
        return None
    generated, logprobs_at = found[0], logprobs.end()
    rest = logprobs_at + ITEM_BYTES * generated
    if not rest <= end <= len(body) <= rest + _MOST_REMEMBERED:
        return None
    if (ended := _rest(bytes(body[runs_at:runs_end]), bytes(body[rest:]), end - rest)) is None:
        return None
    return PlainBody(tokens_at, count, logprobs_at, generated, *ended)


@functools.lru_cache(4096)
def _counted(head: bytes) -> tuple[int, int] | None:
    """Numbers in a tensor of int32, or of float32 after the runs; and, of the former, the end of its segment."""
    first = _TOKENS.match(head)
    match = first or _LOGPROBS.match(head)
    assert match is not None
    size, code, of_count, count, of_data = match.groups()[-5:]
    size_end, length = match.end(len(match.groups()) - 4), _number(of_data)
    dtype = tensor_pb2.DTYPE_INT32 if first else tensor_pb2.DTYPE_FLOAT32
    whole = match.end() + length == size_end + _number(size) and of_count[0] == len(count)
    if not whole or code[0] != dtype or length != ITEM_BYTES * _number(count):
        return None
    return _number(count), first.end(1) + _number(first[1]) if first else 0


@functools.lru_cache(4096)
def _rest(runs: bytes, rest: bytes, in_segment: int) -> tuple[tuple[int, ...], tuple, tuple, int, str] | None:
    """What is not in the arrays; None when it has parts that a plain body has not."""
    try:
        segment = sample_pb2.Segment.FromString(runs + rest[:in_segment])
        body = sample_pb2.SampleBody.FromString(rest[in_segment:])
    except DecodeError:
        return None
    odd = any(segment.HasField(name) for name in ("tokens", "logprobs", "routes", "parent"))
    if odd or segment.fork_point or body.segments or sample_pb2.Segment.FromString(rest[:in_segment]).loss_mask_runs:
        return None
    spans = tuple((v.version, v.step, v.incarnation, v.length) for v in segment.versions)
    turns = tuple((t.turn, t.length) for t in segment.turns)
    return tuple(segment.loss_mask_runs), spans, turns, body.finish_reason, body.info_json


def _number(varint: bytes) -> int:
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 0x7F
    return value


@functools.lru_cache(4096)
def _varint(value: int) -> bytes:
    return varint(value)


def varint(value: int) -> bytes:
    """A number of 0 or more as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
