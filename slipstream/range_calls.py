"""WeightService.ReadRange on the wire: ranges as requests, answers as messages, for whoever serves ranges and whoever asks.

A range travels without spans of no bytes, so both ends mean the same `plain` range by it, under the same name.
"""

from __future__ import annotations

from typing import Any

import grpc

from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.ranges import Range, Span

SERVICE, METHOD = "slipstream.weights.v1.WeightService", "ReadRange"
PREFIXES = ("versions/", "bases/", "files/")  # what is written once, and so may be served
FRAME_BYTES = 1 << 20
_TAG = b"\x0a"  # ReadRangeResponse.data = 1, length-delimited

Frames = tuple[bytes, ...]


def plain(wanted: Range) -> Range:
    """The same bytes and checksums, without spans of no bytes."""
    if all(span.size != 0 for span in wanted.spans):
        return wanted
    return Range(wanted.key, wanted.offset, wanted.size, tuple(s for s in wanted.spans if s.size != 0))


def request_of(wanted: Range, run: str = "", held: bool = False) -> pb.ReadRangeRequest:
    """The request for a range; spans that nobody knows a checksum of are left out."""
    request = pb.ReadRangeRequest(key=wanted.key, offset=wanted.offset, size=wanted.size or 0, run=run, held=held)
    for span in plain(wanted).spans:
        if span.crc32c is not None:
            request.checks.add(offset=span.offset, size=span.size or 0, crc32c=span.crc32c)
    return request


def range_of(request: pb.ReadRangeRequest) -> Range:
    """The range that a request asks for."""
    spans = tuple(Span(c.offset, c.size or None, c.crc32c) for c in request.checks)
    return Range(request.key, request.offset, request.size or None, spans)


def covered(wanted: Range) -> bool:
    """Whether checksums say what every byte of a plain range is to be."""
    at = 0
    for span in wanted.spans:
        if span.offset != at or span.crc32c is None:
            return False
        if span.size is None:
            return span is wanted.spans[-1]
        at += span.size
    return at == wanted.size


def frames(data: bytes) -> Frames:
    """Bytes as serialized ReadRangeResponses of FRAME_BYTES each; one without data for none."""
    view = memoryview(data)
    return tuple(frame(view[start : start + FRAME_BYTES]) for start in range(0, max(1, len(view)), FRAME_BYTES))


def frame(part: memoryview | bytes) -> bytes:
    """One serialized ReadRangeResponse."""
    size, varint = len(part), bytearray()
    while size >= 0x80:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return b"".join((_TAG, bytes((*varint, size)), part))


def data_of(message: bytes) -> memoryview:
    """ReadRangeResponse.data without a copy. A parse copies it; its only field begins with a tag and a size."""
    if not message:
        return memoryview(b"")
    if message[0] != _TAG[0]:
        return memoryview(pb.ReadRangeResponse.FromString(message).data)
    size = shift = 0
    for position in range(1, len(message)):
        size |= (message[position] & 0x7F) << shift
        if message[position] < 0x80:
            if position + 1 + size == len(message):
                return memoryview(message)[position + 1 :]
            break
        shift += 7
    return memoryview(pb.ReadRangeResponse.FromString(message).data)


def reading(channel: grpc.aio.Channel) -> Any:
    """The method as a stub has it, whose messages are memoryviews of their data."""
    return channel.unary_stream(
        f"/{SERVICE}/{METHOD}", request_serializer=pb.ReadRangeRequest.SerializeToString, response_deserializer=data_of)


def add_weight_service(servicer: Any, server: Any) -> None:
    """As the generated function of the same purpose, for a servicer whose answers are serialized already."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.ReadRange, request_deserializer=pb.ReadRangeRequest.FromString, response_serializer=bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
