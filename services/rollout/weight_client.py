"""The weight server as its readers see it: ranges over gRPC, and a pause after a failure, so that a dead one costs little.

waits for     the server's next piece, STALL_S at most, and longer before the first, while it reads the store
unblocked by  the piece; the end of that time
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.errors import SlipstreamError, Unavailable, from_rpc_error
from slipstream.lifecycle import Clock
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.ranges import Range

METHOD = "/slipstream.weights.v1.WeightService/ReadRange"
STALL_S = 5.0
STORE_BYTES_S = 32 << 20  # a store that is slower than this is read without the server
PAUSE_S, PAUSE_MOST_S = 1.0, 60.0


class WeightClient:
    """Ranges from a weight server at host:port."""

    def __init__(self, address: str, credentials: Credentials, clock: Clock) -> None:
        """Raises ConfigError for plaintext to an address that is not loopback."""
        self._address, self._clock = address, clock
        self._channel = rpc.channel(address, credentials=credentials, peer="buffer")
        self._read: Any = self._channel.unary_stream(
            METHOD, request_serializer=pb.ReadRangeRequest.SerializeToString, response_deserializer=_data)
        self._failures = 0
        self._again = 0.0

    @property
    def resting(self) -> bool:
        """Whether a failure was so recent that nobody should ask."""
        return self._clock.monotonic() < self._again

    async def read(self, wanted: Range) -> bytes:
        """The bytes of a range, unchecked. Raises SlipstreamError."""
        try:
            data = await self._pieces(wanted)
        except Unavailable:
            self._failures += 1
            self._again = self._clock.monotonic() + min(PAUSE_S * 2 ** (self._failures - 1), PAUSE_MOST_S)
            raise
        self._failures = 0
        return data

    async def close(self) -> None:
        await self._channel.close()

    async def _pieces(self, wanted: Range) -> bytes:
        request = pb.ReadRangeRequest(key=wanted.key, offset=wanted.offset, size=wanted.size or 0)
        for span in (s for s in wanted.spans if s.size != 0 and s.crc32c is not None):
            request.checks.add(offset=span.offset, size=span.size or 0, crc32c=span.crc32c)
        call: grpc.aio.UnaryStreamCall[Any, memoryview] = self._read(request)
        pieces: list[memoryview] = []
        patience_s = STALL_S + (wanted.size or 0) / STORE_BYTES_S
        try:
            while True:
                async with asyncio.timeout(patience_s):
                    piece = await call.read()
                if not isinstance(piece, memoryview):  # grpc.aio.EOF
                    return b"".join(pieces)
                pieces.append(piece)
                patience_s = STALL_S
        except TimeoutError:
            raise Unavailable(f"weight server {self._address}: nothing for {patience_s:.0f} s", "STALLED") from None
        except grpc.aio.AioRpcError as error:
            found = from_rpc_error(error)
            raise found if isinstance(found, SlipstreamError) else Unavailable(str(error)) from None
        finally:
            call.cancel()


def _data(message: bytes) -> memoryview:
    """ReadRangeResponse.data without a copy. A parse copies it; its only field begins with a tag and a size."""
    if not message:
        return memoryview(b"")
    if message[0] != 0x0A:
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
