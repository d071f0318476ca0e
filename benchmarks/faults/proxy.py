"""A proxy between two processes of a run that resets connections, loses replies and delays bytes when told to.

consumes      connections of clients (gRPC over TCP, Redis over a unix socket)    produces: the same bytes, most of the time
waits for     bytes of either side    unblocked by: the end of either side, which ends the other

Of what it carries it knows only where an answer begins. A fault hits the connection that spoke last:

    reset         both sides get RST, in the middle of whatever they said
    lost reply    what the client says arrives and takes effect; the next answer is swallowed, then both sides get RST
    delay         nothing is forwarded in either direction for some seconds, then all of it
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES = 1 << 16
SWALLOW_S = 8.0  # a lost reply waits this long for one
HTTP2_HEAD = 9  # bytes before a frame: length (3), type (1), flags (1), stream (4)
HTTP2_ANSWERS = (0, 1)  # DATA and HEADERS; settings, pings and window updates answer nobody

Answers = Callable[[bytes], bool]  # told all that a server says, piece by piece: is there (a part of) an answer in this piece?


def any_bytes(data: bytes) -> bool:
    """Protocols in which a server speaks only when asked, as Redis does."""
    return True


class Http2Answers:
    """Finds the frames of one direction of an HTTP/2 connection, however its bytes are cut into pieces."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._rest = 0  # bytes of the present frame that are still to come
        self._answer = False

    def __call__(self, data: bytes) -> bool:
        found, at = False, 0
        while at < len(data):
            if self._rest:
                step = min(self._rest, len(data) - at)
                self._rest -= step
                found = found or self._answer
            else:
                step = min(HTTP2_HEAD - len(self._head), len(data) - at)
                self._head += data[at:at + step]
                if len(self._head) == HTTP2_HEAD:
                    self._rest, self._answer = int.from_bytes(self._head[:3], "big"), self._head[3] in HTTP2_ANSWERS
                    self._head.clear()
            at += step
        return found


@dataclass(eq=False)
class Link:
    """One carried connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    swallowing: bool = False  # what the server says is dropped
    swallowed: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)  # clear = bytes wait
    spoke: float = 0.0  # when one side said something last

    def reset(self) -> None:
        """End both sides at once, with RST where the transport has that."""
        for writer in (self.client, self.server):
            connection = writer.transport.get_extra_info("socket")
            if connection is not None and connection.family != socket.AF_UNIX:
                with contextlib.suppress(OSError):  # it ended by itself meanwhile
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Carries connections to `upstream()`, asked anew for each: "host:port", the path of a unix socket, or "" for nobody."""

    def __init__(self, name: str, upstream: Callable[[], str], answers: Callable[[], Answers] = lambda: any_bytes) -> None:
        self.name = name
        self._answers = answers  # one for each connection
        self._upstream = upstream
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path | None = None) -> str:
        """Begin. Returns the address to connect to: the unix socket `path`, or host:port of a free port."""
        if path is not None:
            self._server = await asyncio.start_unix_server(self._accept, path)
            return str(path)
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def links(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def reset(self) -> bool:
        """Reset one connection. False when there is none."""
        if (link := self._liveliest) is None:
            return False
        link.reset()
        return True

    async def lose_reply(self) -> bool:
        """Lose the next answer of one connection. False when nobody answered anything within SWALLOW_S."""
        if (link := self._liveliest) is None:
            return False
        link.swallowing = True
        lost = True
        try:
            async with asyncio.timeout(SWALLOW_S):
                await link.swallowed.wait()
        except TimeoutError:
            lost = False
        link.reset()
        return lost

    async def delay(self, seconds: float) -> bool:
        """Hold all bytes of one connection. False when there is none."""
        if (link := self._liveliest) is None:
            return False
        link.held.clear()
        await asyncio.sleep(seconds)
        link.held.set()
        return True

    @property
    def _liveliest(self) -> Link | None:
        return max((link for link in self._links if not link.swallowing), key=lambda link: link.spoke, default=None)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer), name=f"{self.name} connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = self._upstream()
        host, _, port = address.rpartition(":")
        try:
            if address.startswith("/"):
                far_reader, far_writer = await asyncio.open_unix_connection(address)
            else:
                far_reader, far_writer = await asyncio.open_connection(host, int(port or 0))
        except OSError:
            writer.transport.abort()
            return
        link = Link(writer, far_writer)
        link.held.set()
        self._links.add(link)
        pumps = [asyncio.create_task(self._pump(link, reader, far_writer, None), name=f"{self.name} asks"),
                 asyncio.create_task(self._pump(link, far_reader, writer, self._answers()), name=f"{self.name} answers")]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            for pump in pumps:
                pump.cancel()
            for side in (writer, far_writer):
                side.close()

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers | None,
    ) -> None:
        """Bytes of one direction until their end; `answers` looks at those of the server."""
        with contextlib.suppress(OSError):  # the other side is gone: so is this one
            while data := await reader.read(READ_BYTES):
                link.spoke = asyncio.get_running_loop().time()
                await link.held.wait()
                if answers is not None:
                    answered = answers(data)
                    if link.swallowing:
                        if answered:
                            link.swallowed.set()
                        continue
                writer.write(data)
                await writer.drain()
