"""Whoever reaches a port may send anything: the service stays up and goes on answering those who know how to ask."""

import asyncio
import random
import ssl
import struct

import grpc
import pytest
from google.rpc import code_pb2
from security_world import SECRET, World, attempt, methods

from slipstream import auth_credentials, rpc
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.tls import server_name

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
ROUNDS = 60


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def nonsense(dice: random.Random) -> bytes:
    """Random bytes, or a good beginning with frames of random kind, flags, stream and payload; sometimes a wrong length."""
    noise = dice.randbytes(dice.choice([1, 50, 5000]))
    if dice.random() < 0.2:
        return noise
    frames = [frame(4, 0, 0, b"")] + [
        frame(dice.choice([*range(10), 255]), dice.randrange(256), dice.choice([0, 1, 3, 1 << 30]), dice.randbytes(
            dice.choice([0, 1, 4, 8, 17, 300]))) for _ in range(dice.randrange(12))]
    data = PREFACE + b"".join(frames)
    return data[:dice.randrange(len(data))] if dice.random() < 0.3 else data


async def throw(address: str, data: bytes, inside: ssl.SSLContext | None) -> None:
    """Send bytes to host:port, and read whatever comes until the other side, or a moment, ends it."""
    host, _, port = address.rpartition(":")
    name = {"server_hostname": server_name("buffer")} if inside else {}
    reader, writer = await asyncio.open_connection(host, int(port), ssl=inside, **name)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(0.05):
            await reader.read(1 << 16)
    except (TimeoutError, ConnectionError, ssl.SSLError):
        return
    finally:
        writer.close()


def handshake(world: World) -> ssl.SSLContext:
    """TLS with a good certificate, speaking HTTP/2."""
    folder = world.folder / "reward"
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])
    return context


@pytest.mark.parametrize("where", ["instead of a handshake", "after the handshake", "plaintext"])
async def test_bytes_that_are_no_http2_hurt_nobody(tmp_path, where: str):
    """60 connections full of nonsense, from one seed, and each time the next good call works, on old and new connections."""
    world, dice = World(tmp_path), random.Random(7)
    server = {"credentials": auth_credentials.fixed(SECRET)} if where == "plaintext" else {}
    status = next(m for m in methods() if m.name == "GetStatus")
    good = auth_credentials.fixed(SECRET, "cli") if where == "plaintext" else world.credentials("cli")
    inside = handshake(world) if where == "after the handshake" else None
    async with world.server(**server) as running, world.channel(good) as channel:
        for _ in range(ROUNDS // 10):
            await asyncio.gather(*(throw(running.address, nonsense(dice), inside) for _ in range(10)))
            assert await attempt(channel, status) == (code_pb2.OK, "")
        async with world.channel(good) as fresh:
            assert await attempt(fresh, status) == (code_pb2.OK, "")


async def test_messages_that_are_too_large_or_no_messages(tmp_path):
    """Over 64 MiB: RESOURCE_EXHAUSTED before it is read whole; bytes that are no message: an error of that call alone."""
    world = World(tmp_path)
    submit = next(m for m in methods() if m.name == "SubmitSamples")
    async with world.server(), world.channel(world.credentials("rollout")) as channel:
        sends = grpc.aio.secure_channel(  # a client without limits of its own
            world.address, grpc.ssl_channel_credentials(*(
                (world.folder / "rollout" / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))),
            [("grpc.ssl_target_name_override", "buffer.slipstream.internal"), ("grpc.max_send_message_length", -1)])
        async with sends:
            call = sends.unary_unary("/slipstream.buffer.v1.SampleService/SubmitSamples")
            for data, code in [(bytes(rpc.MESSAGE_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
                               (b"\xff" * 100, grpc.StatusCode.INVALID_ARGUMENT)]:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(data, timeout=20)
                assert refused.value.code() == code
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # nobody reads what a stranger to the method sends
                await sends.unary_unary("/slipstream.buffer.v1.BatchService/LeaseBatch")(b"\xff" * 100, timeout=20)
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert await attempt(channel, submit, samples_pb2.SubmitSamplesRequest()) == (code_pb2.OK, "")
