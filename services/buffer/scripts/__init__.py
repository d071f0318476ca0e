"""The Lua scripts and how they are run: EVALSHA, EVAL when the server does not know the script, errors by kind.

The server is given one text: `ledger.lua` (shared), `batches.lua` (shared by the trainer's), and each script's own file as a
branch, taken by the name in the request. So the shared part is there once, not twenty times: the server's Lua collects its
garbage in half the time, and the processor's caches keep the code. It travels with this client, so fronts of different releases
can share a server. All keys are passed in KEYS and carry the hash tag of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions

from services.buffer import transitions
from services.buffer.ledger import refuse
from slipstream.errors import SlipstreamError, Unavailable

NAMES = (
    "meta", "groups", "open", "leases", "scoring", "bodies", "transcripts", "scores", "partials", "unscored", "ready", "events",
    "dead", "drops", "batches", "versions", "holds", "unfinished", "cursor")
_SHARED = ("ledger", "batches")
# What passes by itself or is repaired by somebody, and then works by another connection: a failover leaves clients on what is a
# replica now, a server that was frozen in the middle of a script tells everybody else BUSY. Nothing was executed.
_TRANSIENT = (
    exceptions.ConnectionError, exceptions.TimeoutError, exceptions.BusyLoadingError, exceptions.ReadOnlyError,
    exceptions.ClusterDownError, exceptions.TryAgainError, OSError)
_TRANSIENT_REPLIES = re.compile(r"\b(BUSY|NOREPLICAS|MISCONF) ")  # the client has no names for these
_LARGE = 16 << 10
_MULTI, _EXEC = b"*1\r\n$5\r\nMULTI\r\n", b"*1\r\n$4\r\nEXEC\r\n"
ANSWER_S = 60.0  # a server that says nothing for so long is away
Blob = bytes | memoryview
SEND_BYTES = 2 << 20
CONNECTIONS = 48  # twice that, with those kept here, is below the pool's limit of 100, which is an error and not a wait
log = logging.getLogger("slipstream.buffer")


class Scripts:
    """The scripts of one run on one server. `rules` goes along with each call."""

    def __init__(self, client: aioredis.Redis, run: str, rules: Mapping[str, Any]) -> None:
        self.client = client
        self.keys = {name: f"slipstream:{{{run}}}:{name}" for name in NAMES}
        self.lost_connection = False  # set when a call failed; the owner resets it after its grace
        self._idle: list[Any] = []
        self.flight = asyncio.Semaphore(CONNECTIONS)
        self._rules = _bulk(json.dumps(rules))
        self._texts: dict[str, tuple[str, str]] = {}
        self._fixed = _bulk(str(len(NAMES))) + b"".join(map(_bulk, self.keys.values()))

    async def run(
            self, name: str, request: Mapping[str, Any], leases: bytes = b"", items: bytes = b"", blobs: Sequence[Blob] = (),
            now_ms: int = 0, bodies: Sequence[tuple[str, Blob]] = ()) -> tuple[Any, Sequence[str], bytes, list[bytes]]:
        """Result, changed topics, rows and blobs of a script. Raises its refusal, or Unavailable with a retry delay.

        `bodies` (field, body) go into their hash just before the script, in one transaction with it, where there is none yet.
        The script takes away those that have no business there. Through the script itself each would be copied thrice more.
        """
        text, sha = self._text(name if bodies else "")
        parts = map(_bulk, (json.dumps({"script": name, **request}), leases, items))
        arguments: list[Blob] = [self._fixed, _bulk(str(now_ms)), self._rules, *parts]
        for blob in blobs:
            arguments += (b"$%d\r\n" % len(blob), blob, b"\r\n")
        command = len(NAMES) + 8 + len(blobs), _joined(arguments)
        reply = await self._call(text, sha, command, bodies)
        head = json.loads(reply[0])
        if "refused" in head:
            refuse(head["refused"], head["facts"])
        return head["r"], head["w"] or (), reply[1], reply[2:]

    async def _call(
            self, text: str, sha: str, arguments: tuple[int, list[Blob]], bodies: Sequence[tuple[str, Blob]]) -> list[bytes]:
        """One exchange on a connection of its own; beyond CONNECTIONS at once, calls take turns, as they do in the server."""
        async with self.flight:
            return await self._call_now(text, sha, arguments, bodies)

    async def _call_now(
            self, text: str, sha: str, arguments: tuple[int, list[Blob]], bodies: Sequence[tuple[str, Blob]]) -> list[bytes]:
        """The command is packed here: through the client's own packer, 26 arguments would cost more than the rest of a call.

        Connections are kept here between calls: the pool's own check of each takes longer than a script.
        """
        try:
            connection = await self._connection()
            clean = False
            try:
                try:
                    if bodies:
                        reply = await self._transaction(connection, text, arguments, bodies)
                    else:
                        (reply,) = await self._exchange(connection, _command(b"EVALSHA", sha, arguments), 1)
                except exceptions.NoScriptError:
                    (reply,) = await self._exchange(connection, _command(b"EVAL", text, arguments), 1)
                clean = True
                return reply
            except exceptions.ResponseError:
                clean = not bodies  # else there are more replies to come
                raise
            finally:
                if clean:
                    self._idle.append(connection)
                else:  # cancelled, or broken: a reply left on it would be read by the next call
                    await self._give_back(connection)
        except Exception as error:
            raise await self.failed(error) from error

    async def _connection(self) -> Any:
        while self._idle:
            connection: Any = self._idle.pop()
            if connection.is_connected and not connection._reader.at_eof():
                return connection
            await self._give_back(connection)  # the server has closed it
        connection = await self.client.connection_pool.get_connection()
        roomy(connection._writer.get_extra_info("socket"))
        return connection

    async def _give_back(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        await self.client.connection_pool.release(connection)

    async def _transaction(
            self, connection: Any, text: str, arguments: tuple[int, list[Blob]], bodies: Sequence[tuple[str, Blob]],
    ) -> list[bytes]:
        """All or nothing. By its text, not its hash: a server that does not know the hash would keep the bodies all the same.

        A script that refused the whole call has taken nothing away, so that is done here.
        """
        key = _bulk(self.keys["bodies"])
        parts: list[Blob] = [_MULTI]
        for field, body in bodies:
            parts += b"*4\r\n$6\r\nHSETNX\r\n", key, _bulk(field), b"$%d\r\n" % len(body), body, b"\r\n"
        replies = await self._exchange(
            connection, [*_joined(parts), *_command(b"EVAL", text, arguments), _EXEC], len(bodies) + 3)
        *new, reply = replies[-1]
        refused = isinstance(reply, Exception) or len(reply) == 1
        if refused and (fields := [field for (field, _), is_new in zip(bodies, new, strict=True) if is_new]):
            await self._exchange(
                connection, [b"*%d\r\n$4\r\nHDEL\r\n" % (2 + len(fields)), key, *map(_bulk, fields)], 1)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def _exchange(self, connection: Any, parts: Sequence[Blob], count: int) -> list[Any]:
        """Send, and read `count` replies. Past the client's own functions for both, which take longer than most scripts."""
        writer, parser, replies = connection._writer, connection._parser, []
        async with asyncio.timeout(ANSWER_S):
            writer.writelines(parts)
            await writer.drain()
            for _ in range(count):
                reply = await parser.read_response(disable_decoding=True)
                if isinstance(reply, exceptions.ResponseError):
                    raise reply
                replies.append(reply)
        return replies

    async def failed(self, error: Exception) -> SlipstreamError:
        """A server error by kind. After a transient one, idle connections are closed: they lead to the same end."""
        if isinstance(error, _TRANSIENT) or _TRANSIENT_REPLIES.search(str(error)):
            self.lost_connection = True
            while self._idle:
                await self._give_back(self._idle.pop())
            await self.client.connection_pool.disconnect(inuse_connections=False)
            return Unavailable(f"the ledger's Redis is not available: {error}", "REDIS", retry_s=0.5)
        if isinstance(error, exceptions.OutOfMemoryError):
            return Unavailable(f"Redis is full: {error}; raise maxmemory above buffer.quota_bytes", "REDIS_FULL", retry_s=5)
        return SlipstreamError(f"the ledger's Redis refused a script: {error}", "REDIS_SCRIPT")

    def _text(self, only: str = "") -> tuple[str, str]:
        """All scripts as one, or `only` this one, and the hash: what is sent with every call is better short."""
        if only not in self._texts:
            files = {path.stem: path.read_text() for path in sorted(Path(__file__).parent.glob("*.lua"))}
            parts = [_edges("SAMPLE_EDGES", transitions.SAMPLE_EDGES), _edges("GROUP_EDGES", transitions.GROUP_EDGES)]
            parts += [files.pop(name) for name in _SHARED]
            for name in [only] if only else files:
                parts.append(f"if request.script == '{name}' then return (function()\n{files[name]}\nend)() end")
            text = "\n".join(parts)
            self._texts[only] = text, hashlib.sha1(text.encode()).hexdigest()
        return self._texts[only]


def roomy(connection: Any) -> None:
    """Room for SEND_BYTES in a unix socket, as far as the system allows: else a frame of bodies goes in a dozen portions, with
    a turn of both event loops for each. A TCP socket finds its own size, unless it is told one.
    """
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)


def _command(command: bytes, script: str, arguments: tuple[int, list[Blob]]) -> list[Blob]:
    count, packed = arguments
    return [b"*%d\r\n" % count + _bulk(command) + _bulk(script), *packed]


def _joined(parts: Sequence[Blob]) -> list[Blob]:
    """Small parts become one, large ones are sent from where they are."""
    joined: list[Blob] = []
    first = 0
    for n, part in enumerate(parts):
        if len(part) >= _LARGE:
            joined += (b"".join(parts[first:n]), part)
            first = n + 1
    return [*joined, b"".join(parts[first:])]


def _bulk(value: str | bytes) -> bytes:
    """One argument in the wire form of Redis."""
    data = value.encode() if isinstance(value, str) else value
    return b"$%d\r\n%b\r\n" % (len(data), data)


def _edges(name: str, edges: Mapping[str, frozenset[str]]) -> str:
    """A transition table as Lua source."""
    rows = (f"{old} = {{{', '.join(f'{new} = true' for new in sorted(news))}}}" for old, news in edges.items())
    return f"local {name} = {{{', '.join(rows)}}}"
