"""Samples and segments as numpy arrays; their wire form; validation at the boundary.

Axes: T tokens of a segment, M generated tokens (loss_mask = 1) of a segment, L layers, K experts per token.

Example, a prompt of 5 tokens and an answer of 3, all sampled by the version of step 7:
    Segment(tokens=int32[8], loss_mask=bool[8] (0 0 0 0 0 1 1 1), logprobs=float32[3], spans=(Span(9, 7, 1, 3),))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from slipstream import plain_body
from slipstream.errors import InvalidInput
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2

_DTYPES = {
    tensor_pb2.DTYPE_UINT8: np.dtype("<u1"),
    tensor_pb2.DTYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DTYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
}
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_FLAGS = (b"\0", b"\1")
_SHORT = 1024  # tokens of a segment whose mask is remembered
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_Wire = TypeVar("_Wire", tensor_pb2.Tensor, sample_pb2.Routes)

FINISH_STOP = sample_pb2.FINISH_REASON_STOP
FINISH_LENGTH = sample_pb2.FINISH_REASON_LENGTH
FINISH_ABORT = sample_pb2.FINISH_REASON_ABORT


@dataclass(frozen=True, slots=True)
class Span:
    """`length` generated tokens sampled by one policy version."""

    version: int
    step: int
    incarnation: int
    length: int


_span = functools.lru_cache(1024)(Span)  # samples share theirs with many others


@dataclass(slots=True)
class Segment:
    """One token sequence; see slipstream.types.v1.Segment."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    logprobs: np.ndarray  # float32 [M]
    spans: tuple[Span, ...]
    routes: np.ndarray | None = None  # uint8 or uint16 [T-1, L, K], when they travel with the sample
    routes_ref: sample_pb2.Routes | None = None  # dtype, shape and byte range, when they lie in the object store
    parent: int | None = None
    fork_point: int = 0
    turns: tuple[tuple[int, int], ...] = ()  # (model call of the episode, its generated tokens); (): see `turn_numbers`


@dataclass(slots=True)
class Sample:
    """The trained content of one finished episode."""

    segments: list[Segment]
    finish_reason: int = FINISH_STOP
    info_json: str = ""
    score: sample_pb2.Score | None = field(default=None)

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)

    @property
    def generated_tokens(self) -> int:
        return sum(len(s.logprobs) for s in self.segments)

    @property
    def steps(self) -> tuple[int, int]:
        """Lowest and highest optimizer step among the version spans."""
        steps = [span.step for s in self.segments for span in s.spans]
        return min(steps), max(steps)


def turn_numbers(sample: Sample) -> list[np.ndarray]:
    """The model call of the episode, 0-based, that generated each token: int64 [M] for each segment.

    As the segments say; where they do not, every run of generated tokens is a call of its own, in order of the segments.
    """
    found, following = [], 0
    for segment in sample.segments:
        if segment.turns:
            numbers, lengths = [turn for turn, _ in segment.turns], [length for _, length in segment.turns]
        else:
            lengths = _runs(segment.loss_mask)[1::2]
            numbers = list(range(following, following + len(lengths)))
        found.append(np.repeat(np.array(numbers, np.int64), lengths))
        following = max([following, *(number + 1 for number in numbers)])
    return found


def crc32c(data: bytes | memoryview) -> int:
    """CRC-32C (Castagnoli) of `data`. google_crc32c takes no memoryview, but an array that looks through one."""
    if isinstance(data, memoryview):
        return google_crc32c.value(np.frombuffer(data, np.uint8)) if len(data) else 0
    return google_crc32c.value(data)


def tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """An array as a wire tensor, little-endian. Raises InvalidInput for a dtype that the wire does not have."""
    return _fill(tensor_pb2.Tensor(), array)


def _fill(wire: _Wire, array: np.ndarray) -> _Wire:
    """Put dtype, shape and data of an array into a Tensor or Routes. In place: a copy less for each part of each sample."""
    if (code := _CODES.get(array.dtype)) is None:
        if (code := _CODES.get(array.dtype.newbyteorder("<"))) is None:
            raise InvalidInput(f"dtype {array.dtype} is not one of {sorted(map(str, _CODES))}", "DTYPE", dtype=array.dtype)
        array = array.astype(array.dtype.newbyteorder("<"))
    wire.dtype, wire.data = code, array.tobytes()
    wire.shape.extend(array.shape)
    return wire


def array(wire: tensor_pb2.Tensor, name: str = "tensor") -> np.ndarray:
    """A wire tensor as a read-only array. Raises InvalidInput when dtype, shape and data disagree."""
    if (dtype := _DTYPES.get(wire.dtype)) is None:
        raise InvalidInput(f"{name}: dtype {wire.dtype} is unknown", "DTYPE", field=name, value=wire.dtype)
    try:
        flat, shape = np.frombuffer(wire.data, dtype), wire.shape[:]
        return flat if shape == [len(flat)] else flat.reshape(shape)
    except ValueError:
        raise InvalidInput(
            f"{name}: {len(wire.data)} bytes of {dtype} do not have shape {list(wire.shape)}", "SHAPE", field=name
        ) from None


def encode(sample: Sample) -> bytes:
    """The body of a sample, as it travels and is stored."""
    body = sample_pb2.SampleBody(finish_reason=sample.finish_reason, info_json=sample.info_json)  # pyright: ignore
    for s in sample.segments:
        segment = body.segments.add(loss_mask_runs=_runs(s.loss_mask), fork_point=s.fork_point, parent=s.parent)
        _fill(segment.tokens, s.tokens)
        _fill(segment.logprobs, s.logprobs)
        for span in s.spans:
            segment.versions.add(version=span.version, step=span.step, incarnation=span.incarnation, length=span.length)
        for turn, length in s.turns:
            segment.turns.add(turn=turn, length=length)
        if s.routes_ref is not None:
            segment.routes.CopyFrom(s.routes_ref)
        elif s.routes is not None:
            _fill(segment.routes, s.routes)
    return body.SerializeToString()


def decode(data: bytes | memoryview) -> Sample:
    """A body as arrays. Raises InvalidInput naming the field, whatever the bytes are."""
    if (plain := plain_body.read(data)) is not None and sum(plain.runs) == plain.size:
        return _of_plain(plain, data)
    try:
        body = sample_pb2.SampleBody.FromString(data)  # type: ignore[arg-type]  # any buffer will do
    except DecodeError:
        raise InvalidInput(f"the body is not a SampleBody ({len(data)} bytes)", "BODY") from None
    return Sample([_segment(s, i) for i, s in enumerate(body.segments)], body.finish_reason, body.info_json)


def _of_plain(plain: plain_body.PlainBody, data: bytes | memoryview) -> Sample:
    segment = Segment(
        np.frombuffer(data, _INT32, plain.size, plain.tokens_at), _mask(plain.runs),
        np.frombuffer(data, _FLOAT32, plain.generated, plain.logprobs_at), _spans(plain.spans), turns=plain.turns)
    return Sample([segment], plain.finish_reason, plain.info_json)


@functools.lru_cache(1024)
def _spans(spans: tuple[tuple[int, int, int, int], ...]) -> tuple[Span, ...]:
    return tuple(_span(*span) for span in spans)


def _mask(runs: tuple[int, ...]) -> np.ndarray:
    """Alternating runs, the first of False, as a read-only array. Short ones repeat, and are shared; long ones hardly do."""
    return _short_mask(runs) if sum(runs) <= _SHORT else _flags(runs)


def _flags(runs: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(b"".join([_FLAGS[n & 1] * length for n, length in enumerate(runs)]), bool)


_short_mask = functools.lru_cache(1024)(_flags)


def validate(sample: Sample) -> None:
    """Refuse what must never be trained. Raises InvalidInput whose `reason` is counted in a metric.

    Reasons: NO_SEGMENTS, EMPTY_TOKENS, LENGTH_MISMATCH, NO_GENERATED_TOKENS, NON_FINITE_LOGPROB, POSITIVE_LOGPROB,
    VERSION_SPAN, TURNS, PARENT.
    """
    if not sample.segments:
        raise InvalidInput("a sample needs at least one segment", "NO_SEGMENTS", field="segments")
    if not any(len(s.logprobs) for s in sample.segments):
        raise InvalidInput("no segment has a generated token", "NO_GENERATED_TOKENS", field="logprobs")
    for i, s in enumerate(sample.segments):
        place, generated = f"segments[{i}]", int(np.count_nonzero(s.loss_mask))
        if s.tokens.ndim != 1 or not len(s.tokens):
            raise InvalidInput(
                f"{place}.tokens has shape {s.tokens.shape}; at least one token is needed", "EMPTY_TOKENS", field=place
            )
        if len(s.loss_mask) != len(s.tokens):
            raise InvalidInput(
                f"{place}.loss_mask covers {len(s.loss_mask)} of {len(s.tokens)} tokens", "LENGTH_MISMATCH", field=place
            )
        if s.logprobs.shape != (generated,):
            raise InvalidInput(
                f"{place}.logprobs has shape {s.logprobs.shape} for {generated} generated tokens",
                "LENGTH_MISMATCH",
                field=place,
            )
        if not np.isfinite(s.logprobs).all():
            raise InvalidInput(f"{place}.logprobs has NaN or infinity", "NON_FINITE_LOGPROB", field=place)
        if (s.logprobs > 1e-4).any():
            raise InvalidInput(f"{place}.logprobs has {s.logprobs.max()} > 0", "POSITIVE_LOGPROB", field=place)
        if (covered := sum(span.length for span in s.spans)) != generated:
            raise InvalidInput(
                f"{place}.versions covers {covered} of {generated} generated tokens", "VERSION_SPAN", field=place
            )
        if s.turns and (covered := sum(length for _, length in s.turns)) != generated:
            raise InvalidInput(f"{place}.turns covers {covered} of {generated} generated tokens", "TURNS", field=place)
        shape = s.routes.shape if s.routes is not None else tuple(s.routes_ref.shape) if s.routes_ref is not None else None
        if shape is not None and (len(shape) != 3 or shape[0] != len(s.tokens) - 1):
            raise InvalidInput(
                f"{place}.routes has shape {shape} for {len(s.tokens)} tokens; [T-1, L, K] is needed",
                "LENGTH_MISMATCH",
                field=place,
            )
        if s.parent is not None and not 0 <= s.parent < i:
            raise InvalidInput(f"{place}.parent = {s.parent} is not an earlier segment", "PARENT", field=place)


def validate_score(score: sample_pb2.Score) -> None:
    """Refuse non-finite values. Raises InvalidInput with reason NON_FINITE_SCORE."""
    values: dict[str, Sequence[float]] = {
        "scalar": [score.scalar],
        "per_turn": score.per_turn,
        "components": list(score.components.values()),
    }
    for name, numbers in values.items():
        if bad := next((v for v in numbers if not math.isfinite(v)), None):
            raise InvalidInput(f"score.{name} = {bad} is not finite", "NON_FINITE_SCORE", field=name, value=bad)
    if score.HasField("per_token") and not np.isfinite(array(score.per_token, "score.per_token")).all():
        raise InvalidInput("score.per_token has NaN or infinity", "NON_FINITE_SCORE", field="per_token")


def reward_of(score: sample_pb2.Score) -> float:
    """The scalar that is trained on. A failure of the scorer is data: it counts as 0."""
    return 0.0 if score.failure else score.scalar


def _segment(wire: sample_pb2.Segment, i: int) -> Segment:
    place = f"segments[{i}]"
    routes = reference = None
    if wire.HasField("routes"):
        if wire.routes.WhichOneof("source") == "object":
            reference = wire.routes
        else:
            routes = array(
                tensor_pb2.Tensor(dtype=wire.routes.dtype, shape=wire.routes.shape, data=wire.routes.data), f"{place}.routes"
            )
    # Slices: to walk through a repeated field itself takes twice as long.
    spans = tuple([_span(v.version, v.step, v.incarnation, v.length) for v in wire.versions[:]])
    return Segment(
        array(wire.tokens, f"{place}.tokens"),
        _mask(tuple(wire.loss_mask_runs)),
        array(wire.logprobs, f"{place}.logprobs"),
        spans,
        routes,
        reference,
        wire.parent if wire.HasField("parent") else None,
        wire.fork_point,
        tuple((t.turn, t.length) for t in wire.turns) if wire.turns else (),
    )


def _runs(mask: np.ndarray) -> list[int]:
    """Alternating run lengths, starting with a (possibly empty) run of False. A mask has few runs: one search finds each."""
    flags, runs, start, value = mask.astype(bool, copy=False).tobytes(), [], 0, 0
    while (end := flags.find(1 - value, start)) >= 0:
        runs.append(end - start)
        start, value = end, 1 - value
    return [*runs, len(flags) - start]
