"""Hand in finished samples over one stream: frames of about 2 MB, and none waits for the answer to the one before.

consumes      finished samples         produces: one result for each, in their order
waits for     the buffer's answers     unblocked by: an answer to each frame; the end of the stream, after which what was not
                                       answered is handed in again, at no risk since that is idempotent

A frame is a StreamSamplesRequest that is written here, not by a message: through one, a body is copied three times more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from slipstream import rpc
from slipstream.errors import SlipstreamError, Unavailable
from slipstream.lifecycle import Clock, Waits
from slipstream.plain_body import varint
from slipstream.protos.buffer.v1.samples_pb2 import StreamSamplesResponse, SubmitResult, SubmittedSample

FRAME_BYTES = 2 << 20  # less of them costs more for each byte; more, and there are too few in hand to keep both sides busy
METHOD = "/slipstream.buffer.v1.SampleService/StreamSamples"
_WORKER, _SAMPLES, _BODY = b"\x0a", b"\x12", b"\x12"  # tags: StreamSamplesRequest.worker, .samples, SubmittedSample.body


class Handed(NamedTuple):
    """A finished sample beside its body, which is not in it."""

    sample: SubmittedSample
    body: bytes


def apart(sample: SubmittedSample) -> Handed:
    """A sample and its body, from one that has it in it."""
    fields = {field.name: value for field, value in sample.ListFields()}
    body = fields.pop("body", b"")
    return Handed(SubmittedSample(**fields), body)


def frames(worker: str, samples: Sequence[Handed]) -> Iterator[tuple[int, bytes]]:
    """(samples, StreamSamplesRequest) for each frame: as many samples as FRAME_BYTES takes, at least one."""
    head = _field(_WORKER, worker.encode())
    parts, count, size = [*head], 0, 0
    for sample, body in samples:
        fields, start = sample.SerializeToString(), _BODY + varint(len(body))
        whole = len(fields) + len(start) + len(body)
        if count and size + whole > FRAME_BYTES:
            yield count, b"".join(parts)
            parts, count, size = [*head], 0, 0
        parts += _SAMPLES, varint(whole), fields, start, body
        count += 1
        size += whole
    if count:
        yield count, b"".join(parts)


def method(channel: Any) -> Callable[..., Any]:
    """StreamSamples of a channel, with frames as bytes."""
    return channel.stream_stream(METHOD, request_serializer=None, response_deserializer=StreamSamplesResponse.FromString)


async def submit(
    stream: Callable[..., Any], worker: str, samples: Sequence[Handed], timeout_s: float,
) -> AsyncIterator[Sequence[SubmitResult]]:
    """Results as the frames are answered, from one call of `method(channel)`. Raises SlipstreamError: what was not answered by
    then is to be handed in again.
    """
    counts: list[int] = []

    async def requests() -> AsyncIterator[bytes]:
        for count, frame in frames(worker, samples):
            counts.append(count)
            yield frame

    answered = 0
    try:
        async for answer in rpc.stream(stream, requests(), timeout_s):
            if answered >= len(counts) or len(answer.results) != counts[answered]:
                raise SlipstreamError(f"the buffer answered frame {answered} with a wrong number of results", "FRAMES")
            answered += 1
            yield answer.results
    except SlipstreamError as error:
        if error.reason == "INTERNAL":  # gRPC's word for a connection that is lost while something is written into it
            raise Unavailable(f"the connection to the buffer was lost: {error.message}", "UNAVAILABLE") from None
        raise
    if answered != len(counts):
        raise SlipstreamError(f"the buffer answered {answered} of {len(counts)} frames of a stream of samples", "FRAMES")


async def submit_until(
    stream: Callable[..., Any], worker: str, samples: Sequence[Handed], timeout_s: float, waits: Waits, what: str, clock: Clock,
) -> list[SubmitResult]:
    """A result for each sample. What a broken stream left unanswered goes into the next one: see rpc.call_until."""
    results: list[SubmitResult] = []

    async def rest(_: None, timeout: float) -> None:
        async for answer in submit(stream, worker, samples[len(results):], timeout):
            results.extend(answer)

    await rpc.call_until(rest, None, timeout_s, waits, what, clock)
    return results


def _field(tag: bytes, data: bytes) -> tuple[bytes, bytes, bytes]:
    return tag, varint(len(data)), data
