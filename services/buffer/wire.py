"""Messages with large parts, read without parsing those: a parse copies every byte field twice.

`cut` takes length-delimited fields out of a serialized message and leaves a shorter one, which is parsed as usual:

    rest, found = cut(memoryview(SampleLease bytes), {7})      # rest: the lease without its partial; found[7]: [partial]
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from slipstream.protos.buffer.v1 import samples_pb2, samples_pb2_grpc

LARGE = 64 << 10  # bytes from which on a part is worth a cut: below, parsing all of it takes less time
_SAMPLES, _BODY = 2, 2  # SubmitSamplesRequest.samples, SubmittedSample.body
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Submitted(NamedTuple):
    """A SubmitSamplesRequest whose bodies are beside their samples; large ones are views of what was received."""

    samples: Sequence[tuple[samples_pb2.SubmittedSample, bytes | memoryview]]


def submitted(data: bytes) -> Submitted:
    """Reads a SubmitSamplesRequest, or a StreamSamplesRequest, which is laid out alike. Raises DecodeError."""
    if len(data) < LARGE:
        return Submitted([(s, s.body) for s in samples_pb2.SubmitSamplesRequest.FromString(data).samples])
    rest, found = cut(memoryview(data), (_SAMPLES,))
    samples_pb2.SubmitSamplesRequest.FromString(rest)  # nothing in it is needed, but it has to be one
    return Submitted([_submitted_sample(view) for view in found[_SAMPLES]])


def _submitted_sample(data: memoryview) -> tuple[samples_pb2.SubmittedSample, bytes | memoryview]:
    if len(data) < LARGE:
        sample = samples_pb2.SubmittedSample.FromString(data)  # type: ignore[arg-type]  # any buffer will do
        return sample, sample.body
    rest, found = cut(data, (_BODY,))
    return samples_pb2.SubmittedSample.FromString(rest), found[_BODY][-1] if found[_BODY] else b""


def cut(data: memoryview, numbers: Collection[int]) -> tuple[bytes, dict[int, list[memoryview]]]:
    """The message without the length-delimited fields of these numbers, and those. Raises DecodeError."""
    found: dict[int, list[memoryview]] = {number: [] for number in numbers}
    rest: list[memoryview] = []
    position = kept = 0  # what lies between `kept` and `position` is to be kept
    try:
        while position < len(data):
            start = position
            tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _BYTES:
                size, position = _varint(data, position)
                if tag >> 3 in found:
                    rest.append(data[kept:start])
                    found[tag >> 3].append(data[position:position + size])
                    kept = position + size
                position += size
            elif kind == _VARINT:
                _, position = _varint(data, position)
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:
                raise DecodeError(f"wire type {kind} at byte {start}")
    except IndexError as error:
        raise DecodeError("the message ends within a field") from error
    if position != len(data):
        raise DecodeError("the message ends within a field")
    rest.append(data[kept:])
    return b"".join(rest), found


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise DecodeError(f"a number at byte {position} does not end")


def add_sample_service(servicer: Any, server: Any) -> None:
    """As the generated function of the same purpose, but bodies reach SubmitSamples, and frames StreamSamples, unparsed."""
    samples_pb2_grpc.add_SampleServiceServicer_to_server(servicer, _Unparsed(server))  # pyright: ignore[reportArgumentType]


class _Unparsed:
    """Stands in for the server while generated code registers."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same methods as below, whose types cannot be changed any more."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        handlers = {
            **handlers, "SubmitSamples": handlers["SubmitSamples"]._replace(request_deserializer=submitted),
            "StreamSamples": handlers["StreamSamples"]._replace(request_deserializer=None)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
