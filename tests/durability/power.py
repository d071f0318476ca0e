"""A Redis whose machine can lose power: what was not on the disk at the kill is gone afterwards.

SIGKILL alone keeps the page cache, so it cannot tell the durability modes apart. Here a preloaded shim notes the size of the
append-only file at each completed fdatasync; after the kill the file is cut to the last one. The size that the file had at an
acknowledgement would prove nothing: it includes bytes that were only written.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.redis_server import VALKEY, RedisProcess, Server

SHIM = Path(__file__).with_name("fsync_shim.c")


def build_shim(folder: Path) -> Path:
    """The shim as a shared object."""
    library = folder / "fsync_shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, SHIM, "-ldl"], check=True)
    return library


class Machine:
    """`redis` runs on it; `lose_power()` ends it as a power cut would."""

    def __init__(self, folder: Path, shim: Path, appendfsync: str, server: Server = VALKEY) -> None:
        self._log = folder / "fsync.log"
        folder.mkdir(parents=True, exist_ok=True)
        preload = {"LD_PRELOAD": str(shim), "FSYNC_LOG": str(self._log)}
        self.redis = RedisProcess(folder / "redis", appendfsync, server, environment=preload)

    def lose_power(self) -> int:
        """Kill the server, and forget what no completed fdatasync covers. How many bytes that were."""
        self.redis.kill()
        on_disk: dict[str, int] = {}
        for line in self._log.read_text().splitlines():
            size, path = line.split(" ", 1)
            on_disk[path] = int(size)
        newest = max((self.redis.folder / "appendonlydir").glob("*.incr.aof"), key=_number)
        kept, lost = on_disk.get(str(newest), 0), 0
        with newest.open("r+b") as file:
            lost = file.seek(0, 2) - kept
            file.truncate(kept)
        return lost


def _number(path: Path) -> int:
    """Of appendonly.aof.<number>.incr.aof."""
    return int(path.name.split(".")[-3])


@contextlib.contextmanager
def machine(folder: Path, shim: Path, appendfsync: str, server: Server = VALKEY) -> Iterator[Machine]:
    """A running server on a machine of its own."""
    here = Machine(folder, shim, appendfsync, server)
    here.redis.start()
    try:
        yield here
    finally:
        here.redis.kill()
