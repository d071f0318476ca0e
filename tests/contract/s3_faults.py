"""A proxy before an S3 server that does to requests what networks and busy stores do. Real HTTP, one request a connection.

    async with fault_proxy(endpoint) as proxy, open_bucket(proxy.url) as store:
        proxy.plan = scripted("busy", "lost")             # or seeded(7, share=0.3)
        ...
    proxy.injected["lost", "PUT"]

| fault     | what happens                                                              | did it take effect? |
|-----------|---------------------------------------------------------------------------|---------------------|
| busy      | 503 SlowDown                                                              | no                  |
| pending   | 409 ConditionalRequestConflict, for a write with a condition               | no                  |
| gone      | 404 NoSuchUpload, as S3 says to the second completion of a large upload    | no                  |
| reset     | the connection is reset before the server sees the request                | no                  |
| lost      | the server answers, and the connection is reset instead of the reply       | yes                 |
| halved    | the reply's body breaks off in the middle                                 | yes                 |
| slow      | the reply comes late and in small pieces                                  | yes                 |
| flipped   | one bit of the body that is read is another                               | yes                 |
| damaged   | one bit of the body that is written is another                            | yes, wrongly        |

A 412 after a lost reply is what the server says to the repetition of a conditional write that was `lost`.
The last two are noticed by whoever keeps checksums: checkpoints, versions, the batch log. Of a small body that is written the
server notices it, when it compares Content-MD5 (S3 and ministack do, moto does not).
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

NETWORK = ("busy", "pending", "reset", "lost", "halved", "slow")
EVERY = (*NETWORK, "flipped", "damaged")
RUN = 2  # seeded plans hit no request more often than this in a row: fewer than the store's tries

_REPLIES = {
    "busy": (503, "Slow Down", "SlowDown"), "pending": (409, "Conflict", "ConditionalRequestConflict"),
    "gone": (404, "Not Found", "NoSuchUpload")}


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request. Header names are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def conditional(self) -> bool:
        return "if-match" in self.headers or "if-none-match" in self.headers

    def suffers(self, fault: str) -> bool:
        """Whether a fault makes sense for this request."""
        reads = self.method == "GET" and "list-type" not in self.target
        return {
            "pending": self.conditional and self.method == "PUT", "halved": reads, "flipped": reads,
            "damaged": self.method == "PUT" and bool(self.body)}.get(fault, True)


Plan = Callable[[Request], str]  # the name of a fault, or "" for none


def scripted(*faults: str) -> Plan:
    """These faults for the next requests, "" for one that passes; then none."""
    left = list(faults)
    return lambda request: left.pop(0) if left else ""


def seeded(seed: int, share: float, kinds: tuple[str, ...] = NETWORK) -> Plan:
    """A random fault for this share of the requests, never more than RUN in a row for one request."""
    chance, run = random.Random(seed), Counter()

    def plan(request: Request) -> str:
        about = (request.method, request.target, request.headers.get("range"))
        possible = [kind for kind in kinds if request.suffers(kind)]
        if chance.random() >= share or run[about] >= RUN:
            run[about] = 0
            return ""
        run[about] += 1
        return chance.choice(possible)

    return plan


class FaultProxy:
    """`plan` may be replaced at any time. `requests` counts all, `injected` faults by (fault, method)."""

    def __init__(self, endpoint: str, plan: Plan, seed: int) -> None:
        place = urlsplit(endpoint)
        assert place.hostname and place.port
        self._upstream, self._chance = (place.hostname, place.port), random.Random(seed)
        self.plan, self.url = plan, ""
        self.requests: Counter[str] = Counter()
        self.injected: Counter[tuple[str, str]] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request, head = await _read_request(reader, writer)
            self.requests[request.method] += 1
            fault = self.plan(request)
            if fault:
                self.injected[fault, request.method] += 1
            if fault in _REPLIES:
                writer.write(_error(*_REPLIES[fault]))
            elif fault != "reset":
                body = self._flip(request.body) if fault == "damaged" else request.body
                await self._answer(writer, await self._ask(head, body), fault)
            if fault in ("reset", "lost"):  # RST, not FIN: nothing more comes, and nothing in flight counts
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                await writer.drain()
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, reply: bytes, fault: str) -> None:
        head, _, body = reply.partition(b"\r\n\r\n")
        head = b"\r\n".join(h for h in head.split(b"\r\n") if not h.lower().startswith(b"connection:"))
        head += b"\r\nConnection: close\r\n\r\n"
        if fault == "halved":
            body = body[: len(body) // 2]
        elif fault == "flipped":
            body = self._flip(body)
        if fault == "slow":
            for start in range(0, len(head), 64):
                writer.write(head[start : start + 64])
                await asyncio.sleep(0.002)
            writer.write(body)
        elif fault != "lost":
            writer.write(head + body)

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(head + body)
            return await reader.read()
        finally:
            writer.close()

    def _flip(self, body: bytes) -> bytes:
        if not body:
            return body
        changed = bytearray(body)
        changed[self._chance.randrange(len(body))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)


@contextlib.asynccontextmanager
async def fault_proxy(endpoint: str, seed: int = 0, kind: type[FaultProxy] = FaultProxy) -> AsyncIterator[FaultProxy]:
    """A proxy in this event loop, listening on `proxy.url`. `seed` says which bits are flipped."""
    proxy = kind(endpoint, scripted(), seed)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 20)
    proxy.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Request, bytes]:
    """The request, and its head as it goes on: for one request only, the body at once."""
    lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    method, target, _ = lines[0].decode().split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.decode().partition(":") for line in lines[1:])}
    assert "transfer-encoding" not in headers, "the store sends bodies of a known length"
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    kept = [line for line in lines if line.split(b":")[0].strip().lower() not in (b"expect", b"connection")]
    return Request(method, target, headers, body), b"\r\n".join([*kept, b"Connection: close", b"", b""])


def _error(status: int, phrase: str, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the proxy</Message></Error>"
    return (
        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n\r\n{body}").encode()
