"""The fault proxy carries bytes, and its faults are what they say: RST, an effect without its answer, a delay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from benchmarks.faults.proxy import Http2Answers, Proxy


@contextlib.asynccontextmanager
async def shouting(heard: list[bytes]) -> AsyncIterator[str]:
    """A server that notes each line and answers it."""
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            heard.append(line)
            writer.write(line.upper())

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def proxied(heard: list[bytes]) -> AsyncIterator[tuple[Proxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    async with shouting(heard) as upstream:
        proxy = Proxy("test", lambda: upstream)
        host, port = (await proxy.listen()).split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello\n")
        assert (await reader.readline()).strip() == b"HELLO"
        try:
            yield proxy, reader, writer
        finally:
            writer.close()
            await proxy.close()


async def test_a_reset_is_seen_as_one() -> None:
    """Both sides are torn down with RST, not with an orderly end."""
    async with proxied([]) as (proxy, reader, _):
        assert proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_lost_reply_took_effect() -> None:
    """The request arrives, its answer does not, and the connection is gone."""
    heard: list[bytes] = []
    async with proxied(heard) as (proxy, reader, writer):
        losing = asyncio.create_task(proxy.lose_reply())
        await asyncio.sleep(0)
        writer.write(b"pay 5\n")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert await losing
        assert heard == [b"hello\n", b"pay 5\n"]


async def test_a_delay_loses_nothing() -> None:
    """Bytes wait and then arrive."""
    async with proxied([]) as (proxy, reader, writer):
        delaying = asyncio.create_task(proxy.delay(0.2))
        await asyncio.sleep(0)
        started = time.monotonic()
        writer.write(b"late\n")
        assert (await reader.readline()).strip() == b"LATE"
        assert time.monotonic() - started >= 0.19
        assert await delaying


async def test_nobody_upstream_is_a_refused_connection() -> None:
    """Without a server the client is turned away at once; without a connection no fault is counted."""
    proxy = Proxy("test", lambda: "127.0.0.1:1")
    host, port = (await proxy.listen()).split(":")
    reader, _ = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(ConnectionResetError):
        assert not await reader.read()
    assert not proxy.reset()
    await proxy.close()


@pytest.mark.parametrize("piece", [1, 4, 9, 1000])
def test_answers_are_told_from_pings(piece: int) -> None:
    """Settings, pings and window updates answer nobody; headers and data do, whatever the pieces in which they come."""
    def frame(kind: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + body

    def told(data: bytes) -> bool:
        return sum(answers(data[at:at + piece]) for at in range(0, len(data), piece)) > 0

    answers = Http2Answers()
    assert not told(frame(4, b"") + frame(6, b"12345678") + frame(8, b"1234"))
    assert told(frame(1, b"headers"))
    assert not told(frame(6, b"12345678"))
    assert told(frame(8, b"1234") + frame(0, b"data" * 20000))
    assert not told(frame(4, b""))
