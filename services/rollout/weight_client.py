"""The weight server as its readers see it: ranges over gRPC, and a pause after a failure, so that a dead one costs little.

waits for     the server's next piece, STALL_S at most, and longer before the first, while it reads the store
unblocked by  the piece; the end of that time
"""

from __future__ import annotations

import asyncio

import grpc

from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.errors import SlipstreamError, Unavailable, from_rpc_error
from slipstream.lifecycle import Clock
from slipstream.range_calls import reading, request_of
from slipstream.ranges import Range

STALL_S = 5.0
STORE_BYTES_S = 32 << 20  # a store that is slower than this is read without the server
PAUSE_S, PAUSE_MOST_S = 1.0, 60.0
MOST_BYTES = 1 << 30  # of an object whose size nobody knows


class Rest:
    """How long somebody who failed is left alone: PAUSE_S, doubled with each failure in a row up to PAUSE_MOST_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures = 0
        self._again = 0.0

    @property
    def over(self) -> bool:
        """Whether to ask again."""
        return self._clock.monotonic() >= self._again

    def begin(self, seconds: float | None = None) -> None:
        """After a failure; `seconds` instead of the pause that is due."""
        self._failures += 1
        pause_s = min(PAUSE_S * 2 ** min(self._failures - 1, 16), PAUSE_MOST_S) if seconds is None else seconds
        self._again = self._clock.monotonic() + pause_s

    def end(self) -> None:
        """After a success."""
        self._failures = 0


class WeightClient:
    """Ranges from a weight server at host:port."""

    def __init__(self, address: str, credentials: Credentials, clock: Clock) -> None:
        """Raises ConfigError for plaintext to an address that is not loopback."""
        self._address = address
        self._channel = rpc.channel(address, credentials=credentials, peer="buffer")
        self._read = reading(self._channel)
        self._rest = Rest(clock)

    @property
    def resting(self) -> bool:
        """Whether a failure was so recent that nobody should ask."""
        return not self._rest.over

    async def read(self, wanted: Range) -> bytes:
        """The bytes of a range, unchecked. Raises SlipstreamError."""
        try:
            first_s = STALL_S + (wanted.size or 0) / STORE_BYTES_S
            data = await received(self._read(request_of(wanted)), wanted, first_s, STALL_S, f"weight server {self._address}")
        except Unavailable:
            self._rest.begin()
            raise
        self._rest.end()
        return data

    async def close(self) -> None:
        await self._channel.close()


async def received(
    call: grpc.aio.UnaryStreamCall[object, memoryview], wanted: Range, first_s: float, next_s: float, who: str,
) -> bytes:
    """The joined pieces of an answer; each comes within its time after the one before, more than was asked for is not waited
    for. Raises SlipstreamError: Unavailable (STALLED) for a silence, the server's errors."""
    pieces: list[memoryview] = []
    size, patience_s, most = 0, first_s, MOST_BYTES if wanted.size is None else wanted.size
    try:
        while size <= most:
            async with asyncio.timeout(patience_s):
                piece = await call.read()
            if not isinstance(piece, memoryview):  # grpc.aio.EOF
                break
            pieces.append(piece)
            size += len(piece)
            patience_s = next_s
        return b"".join(pieces)
    except TimeoutError:
        raise Unavailable(f"{who}: nothing for {patience_s:.1f} s", "STALLED") from None
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
        raise found if isinstance(found, SlipstreamError) else Unavailable(str(error)) from None
    finally:
        call.cancel()
