"""What a worker hands in is checked here, before the ledger sees it.

The checks are those of slipstream.sample; a body that plainly passes them is recognised straight from the message, without
making arrays (8 µs instead of 30). Whatever is not plain goes the long way, which also finds the words for what is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from services.buffer.front import to_lease
from services.buffer.ledger import Partial, Submit
from slipstream import sample
from slipstream.errors import InvalidInput
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2

_INT32, _FLOAT32 = tensor_pb2.DTYPE_INT32, tensor_pb2.DTYPE_FLOAT32
_LARGE = 48 << 10  # bytes of a body from which on a parse, which copies its tensors twice, takes longer than a look at its ends
# A body as slipstream.sample.encode writes it, up to the data of its tokens, and from there to that of its log-probabilities.
# A tensor: dtype, one dimension (its bytes, its number), size of the data.
_NUMBER = rb"([\x80-\xff]{0,4}[\x00-\x7f])"
_TENSOR = _NUMBER + rb"\x08([\x00-\x7f])\x12([\x01-\x05])" + _NUMBER + rb"\x1a" + _NUMBER
_TOKENS = re.compile(rb"\x0a" + _NUMBER + rb"\x0a" + _TENSOR)
_RUNS, _LOGPROBS = re.compile(rb"\x12" + _NUMBER), re.compile(rb"\x1a" + _TENSOR)
_EMPTY_SCORE = b"\x2a\x00"  # a Score with its empty `failure` written out
Found = tuple[int, int, Sequence[tuple[int, int]]]  # tokens, generated tokens, distinct (step, incarnation)


def checked_sample(wire: samples_pb2.SubmittedSample, body: bytes | memoryview) -> Submit:
    """A submitted sample: checksum, contents, header against body, score. Raises InvalidInput with the reason to count."""
    lease = to_lease(wire.lease)
    if wire.failure:
        return Submit(lease, b"", 0, 0, 0, (), failure=wire.failure[:200])
    checksum = wire.crc32c
    if sample.crc32c(body) != checksum:
        raise InvalidInput(f"the body of draw {lease.draw} sample {lease.sample} has another crc32c; send it again", "CRC")
    tokens, generated, steps = (_plain(body) if len(body) < _LARGE else _plain_large(body)) or _thorough(body)
    told = (wire.tokens, wire.generated_tokens, wire.oldest_step, wire.newest_step)
    if (found := (tokens, generated, steps[0][0], steps[-1][0])) != told:
        raise InvalidInput(
            f"tokens, generated_tokens, oldest_step, newest_step = {told}, but the body has {found}", "HEADER_MISMATCH")
    if wire.HasField("score"):
        return Submit(lease, body, checksum, tokens, generated, steps, score=checked_score(wire.score),
                      reward=sample.reward_of(wire.score), bounded=True)
    return Submit(lease, body, checksum, tokens, generated, steps, wire.transcript, bounded=True)


def checked_partial(wire: samples_pb2.PartialSample) -> Partial:
    """A partial: checksum and form. It may have no generated token yet."""
    if sample.crc32c(wire.body) != wire.crc32c:
        raise InvalidInput("the body of a partial has another crc32c; send it again", "CRC")
    return Partial(to_lease(wire.lease), wire.body, _steps(sample.decode(wire.body)), wire.release)


def checked_score(score: sample_pb2.Score) -> bytes:
    """A score as stored. Never empty, since no bytes mean "no score" (a scalar of 0 serializes to nothing)."""
    if score.per_turn or score.components or score.HasField("per_token") or not math.isfinite(score.scalar):
        sample.validate_score(score)
    return score.SerializeToString() or _EMPTY_SCORE


def _plain(body: bytes | memoryview) -> Found | None:
    """What the ledger needs of a body, if all is well with it and it has one segment without routes."""
    try:
        message = sample_pb2.SampleBody.FromString(body)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError:
        return None
    if len(message.segments) != 1:
        return None
    segment = message.segments[0]
    tokens, logprobs = segment.tokens, segment.logprobs
    ids, values = tokens.data, logprobs.data
    if tokens.dtype != _INT32 or 4 * math.prod(tokens.shape) != len(ids) or len(tokens.shape) != 1:
        return None
    if logprobs.dtype != _FLOAT32 or 4 * math.prod(logprobs.shape) != len(values) or len(logprobs.shape) != 1:
        return None
    return _plain_segment(segment, ids, values)


def _plain_large(body: bytes | memoryview) -> Found | None:
    """The same, with the tensors' data left where they are."""
    view = memoryview(body)
    if (head := _TOKENS.match(view)) is None or (ids := _data(view, head, 2, _INT32)) is None:
        return None
    end = head.end(1) + _number(head[1])  # of the segment
    if (runs := _RUNS.match(view, after := head.end() + len(ids))) is None:
        return None
    middle = runs.end() + _number(runs[1])
    if (head := _LOGPROBS.match(view, middle)) is None or (values := _data(view, head, 1, _FLOAT32)) is None:
        return None
    last = head.end() + len(values)
    if not middle <= last <= end <= len(view):
        return None
    try:
        segment = sample_pb2.Segment.FromString(b"".join((view[after:middle], view[last:end])))
        rest = sample_pb2.SampleBody.FromString(bytes(view[end:]))
        if segment.HasField("tokens") or segment.HasField("logprobs") or rest.segments:
            return None
    except DecodeError:
        return None
    return _plain_segment(segment, ids, values)


def _data(view: memoryview, head: re.Match[bytes], first: int, dtype: int) -> memoryview | None:
    """The data of a tensor whose groups in `head` begin with `first`, if there is as much as it says of this dtype."""
    size, code, of_count, count, of_data = head.group(*range(first, first + 5))
    data = view[head.end():head.end() + (length := _number(of_data))]
    whole = head.end() + length == head.end(first) + _number(size) and of_count[0] == len(count)
    return data if whole and code[0] == dtype and length == len(data) == 4 * _number(count) else None


def _number(varint: bytes) -> int:
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 0x7F
    return value


def _plain_segment(segment: sample_pb2.Segment, ids: bytes | memoryview, values: bytes | memoryview) -> Found | None:
    """`ids` and `values`: data of the tokens and of the log-probabilities, whose tensors are well-formed."""
    runs, spans = segment.loss_mask_runs, segment.versions
    count, generated = len(ids) >> 2, len(values) >> 2
    if segment.HasField("routes") or segment.HasField("parent") or not generated:
        return None
    if segment.turns and sum(turn.length for turn in segment.turns) != generated:
        return None
    if sum(runs) != count or sum(runs[1::2]) != generated or not _are_logprobs(values):
        return None
    if len(spans) == 1:
        span = spans[0]
        return (count, generated, [(span.step, span.incarnation)]) if span.length == generated else None
    if sum(span.length for span in spans) != generated:
        return None
    return count, generated, sorted({(span.step, span.incarnation) for span in spans})


def _are_logprobs(data: bytes | memoryview) -> bool:
    """Whether all are finite and none is above 0. numpy takes 5 µs for a look at however few."""
    if len(data) < 512:
        few = memoryview(data).cast("f")
        return max(few) <= 0 and sum(few) > -math.inf  # a NaN makes the sum one, and fails
    values = np.frombuffer(data, np.float32)
    return bool(values.max() <= 0 and values.min() > -math.inf)  # a NaN fails both


def _thorough(body: bytes | memoryview) -> Found:
    decoded = sample.decode(body)
    sample.validate(decoded)
    return decoded.tokens, decoded.generated_tokens, _steps(decoded)


def _steps(decoded: sample.Sample) -> list[tuple[int, int]]:
    return sorted({(span.step, span.incarnation) for segment in decoded.segments for span in segment.spans})
