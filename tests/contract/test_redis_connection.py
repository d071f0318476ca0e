"""Which servers the buffer accepts: each refusal names what to change, and whatever is not refused works."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.buffer.connection import COMMANDS, Check, connect, ping, shown, verify
from slipstream.errors import ConfigError, Unavailable
from tests.redis_server import RedisProcess, redis_process

SCRIPTS = Path(__file__).resolve().parents[2] / "services" / "buffer" / "scripts"


async def told(url: str, durability: str = "always", check: Check = "warn", quota_bytes: int = 0) -> str:
    """The refusal of a server; empty when it is accepted."""
    client = connect(url)
    try:
        await verify(client, durability, check, "run", quota_bytes)
    except ConfigError as error:
        return error.message
    finally:
        await client.aclose()
    return ""


async def configure(redis: RedisProcess, *command: str) -> None:
    client = connect(redis.admin_url)
    await client.execute_command(*command)
    await client.aclose()


@pytest.fixture
def always(tmp_path: Path):
    with redis_process(tmp_path / "always", "always") as process:
        yield process


async def test_a_server_that_would_lose_what_it_acknowledges_is_refused(always: RedisProcess) -> None:
    """Each setting that weakens `always` is named with its value; put back, the server is accepted."""
    assert await told(always.url) == ""
    for name, weaker, word in [
            ("appendfsync", "everysec", "appendfsync = everysec"), ("no-appendfsync-on-rewrite", "yes", "on-rewrite"),
            ("appendonly", "no", "append-only"), ("maxmemory-policy", "allkeys-lru", "noeviction"),
            ("maxmemory", "50mb", "buffer.quota_bytes")]:
        right = {"appendfsync": "always", "no-appendfsync-on-rewrite": "no", "appendonly": "yes", "maxmemory": "0"}
        await configure(always, "CONFIG", "SET", name, weaker)
        assert word in await told(always.url, quota_bytes=1 << 30), name
        await configure(always, "CONFIG", "SET", name, right.get(name, "noeviction"))
    assert await told(always.url, quota_bytes=1 << 30) == ""
    await configure(always, "CONFIG", "SET", "appendonly", "no")
    assert await told(always.url, "memory") == ""
    assert await told(always.url, check="trust") == "", "a managed server with a log of its own, on the operator's word"


async def test_without_config_and_waitaof_it_works_and_says_what_it_cannot_know(
        always: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    """One warning line; `require` makes a refusal of it, with both ways out."""
    await configure(always, "ACL", "SETUSER", "managed", "on", ">pw", "~slipstream:*", "+@all", "-config", "-waitaof")
    url = f"unix://managed:pw@{always.socket}"
    assert await told(url) == ""
    assert len(caplog.records) == 1 and "cannot be verified: CONFIG is denied" in caplog.text
    refusal = await told(url, check="require")
    assert "+config|get" in refusal and "durability_check = warn" in refusal


async def test_missing_permissions_are_named(always: RedisProcess) -> None:
    """The user of the remedy's sentence is enough; less is refused by the command or key that is missing."""
    enough = ["on", ">pw", "+@read", "+@write", "+@transaction", "+eval", "+evalsha"]
    enough += ["+time", "+info", "+ping", "~slipstream:*"]
    url = f"unix://worker:pw@{always.socket}"
    for changes, word in [
            ([], ""), (["-xadd"], "XADD: "), (["-time"], "TIME: "), (["-eval"], "+eval"), (["-info"], "+info"),
            (["-@transaction"], "+@transaction"), (["resetkeys", "~other:*"], "~slipstream:*")]:
        await configure(always, "ACL", "SETUSER", "worker", "reset", *enough, *changes)
        refusal = await told(url)
        assert (refusal == "") if not word else word in refusal, (changes, refusal)


def test_the_probe_runs_every_command_that_the_scripts_run() -> None:
    """A script that begins to use another command must be probed for it."""
    sources = "".join(path.read_text() for path in SCRIPTS.glob("*.lua"))
    used = set(re.findall(r"\bcall\('([A-Z]+)'", sources)) | set(re.findall(r"flush\([^)]*'([A-Z]+)'\)", sources))
    assert len(used) > 15
    assert used <= {line.split()[0] for line in COMMANDS}


async def test_replicas_and_sentinels_are_refused(always: RedisProcess, tmp_path: Path) -> None:
    """A replica would answer READONLY to every write; a Sentinel is not a ledger at all."""
    with redis_process(tmp_path / "replica", "always", arguments=["--replicaof", "127.0.0.1", "1"]) as replica:
        assert "read-only replica of 127.0.0.1:1" in await told(replica.url)
    for url in ("redis+sentinel://h:26379/primary", "sentinel://h", "http://h"):
        with pytest.raises(ConfigError, match="scheme is not one of redis, rediss, unix"):
            connect(url)


async def test_a_cluster_is_used_when_the_run_lies_on_this_node(tmp_path: Path) -> None:
    """A cluster of one shard (as MemoryDB's smallest) works; one whose other nodes hold the run's slot is refused by name."""
    with redis_process(
            tmp_path, "always", arguments=["--cluster-enabled", "yes", "--port", "0", "--cluster-port", "0"]) as cluster:
        assert "cluster of one shard" in await told(cluster.url)
        await configure(cluster, "CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        async with asyncio.timeout(10):
            while refusal := await told(cluster.url):  # the node counts itself as well only after a moment
                assert "cluster" in refusal
                await asyncio.sleep(0.05)


async def test_a_wrong_password_is_told_at_once_and_never_shown(always: RedisProcess) -> None:
    await configure(always, "ACL", "SETUSER", "worker", "on", ">right", "~slipstream:*", "+@all")
    url = f"unix://worker:wrong@{always.socket}"
    client = connect(url)
    with pytest.raises(ConfigError, match="refused the user or the password") as error:
        await ping(client, url)
    await client.aclose()
    assert "wrong" not in error.value.message and shown(url) == f"unix://worker:***@{always.socket}"
    always.kill()
    client = connect(always.url)
    with pytest.raises(Unavailable):
        await ping(client, always.url)
    await client.aclose()


async def test_tls_with_an_authority_of_ones_own(always: RedisProcess, tmp_path: Path) -> None:
    """rediss:// with the authority's file and an ACL user works; without the file, or with another name, it is refused at
    once: waiting would not help."""
    await configure(always, "ACL", "SETUSER", "worker", "on", ">pw", "~slipstream:*", "+@all", "-config")
    authority, chain = certificates(tmp_path)
    async with tls_front(always.socket, chain) as port:
        url = f"rediss://worker:pw@127.0.0.1:{port}/0"
        client = connect(url, str(authority))
        await ping(client, url)
        await verify(client, "always")
        await client.aclose()
        for other, ca_file in [(url, ""), (url.replace("127.0.0.1", "localhost"), str(authority))]:
            client = connect(other, ca_file)
            with pytest.raises(ConfigError, match="redis_ca_file"):
                await ping(client, other)
            await client.aclose()
    with pytest.raises(ConfigError, match="rediss://"):
        connect("redis://h", str(authority))


@contextlib.asynccontextmanager
async def tls_front(socket: Path, chain: Path) -> AsyncIterator[int]:
    """Port of a TLS server before a unix socket: Valkey's wheel comes without TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_unix_connection(str(socket))
        tasks.update((asyncio.create_task(copy(reader, inner[1])), asyncio.create_task(copy(inner[0], writer))))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.gather(*tasks)


def certificates(folder: Path) -> tuple[Path, Path]:
    """An authority (PEM), and key and certificate for 127.0.0.1 that it signed (PEM)."""
    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def certificate(subject: str, public: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            name("authority"), name(subject), public, x509.random_serial_number(), now - datetime.timedelta(days=1),
            now + datetime.timedelta(days=1))
        return builder.add_extension(extension, critical=True).sign(root, hashes.SHA256())

    root, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = certificate("authority", root.public_key(), x509.BasicConstraints(ca=True, path_length=None))
    leaf = certificate("redis", key.public_key(), x509.SubjectAlternativeName([
        x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]))
    pem = serialization.Encoding.PEM
    (folder / "authority.pem").write_bytes(authority.public_bytes(pem))
    (folder / "chain.pem").write_bytes(key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()) + leaf.public_bytes(pem))
    return folder / "authority.pem", folder / "chain.pem"
