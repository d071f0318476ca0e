"""A folder of byte ranges that the workers of a node share: each range is fetched once for all of them.

Files are named after what they hold (`Range.name`) and never change. The folder believes nothing: whoever reads a file compares
it with the checksums of the version's manifest, and deletes it when it is cut off or damaged, which a crash of the machine may
leave behind. So nothing is synced to the disk.

    <name>              the bytes of one range
    .lock               held, by flock, while somebody makes room and writes: a temp file that is found then is an orphan
    .turn-<two digits>  held while somebody fetches ranges whose names begin so; the kernel lets go when its holder dies

Any number of processes, also of several pods of a node, share a folder. What is used longest ago goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from slipstream.errors import ConfigError, Unavailable
from slipstream.objects import Piece

TURN_S = 30.0  # whoever has waited this long for another process to fetch a range fetches it, too
POLL_S = 0.01
LOCK_S = 10.0  # a range is not kept when the folder's lock is not to be had for this long
TEMP = ".new-"


class NodeCache:
    """Ranges by name, at most `most_bytes` of them. All methods may raise Unavailable, and nothing else."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Makes the folder, for this user alone. Raises ConfigError when it cannot be used or others may write to it."""
        self._folder, self._most = folder, most_bytes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
            with (folder / ".lock").open("ab"):
                pass
        except OSError as error:
            raise ConfigError(
                f"objects.near.cache = {str(folder)!r} cannot be used ({error.strerror}): name a folder that this user may "
                "write to") from None
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ConfigError(
                f"objects.near.cache = {str(folder)!r}: others may write to this folder, and so choose what is sampled with; "
                f"chmod 700 it, or name one that belongs to this user")

    async def get(self, name: str) -> bytes | None:
        """The bytes under a name; None when they are not here."""
        return await asyncio.to_thread(self._get, name)

    async def put(self, name: str, data: Piece) -> None:
        """Keep bytes, unless they are more than the cache may hold."""
        if len(data) <= self._most:
            await asyncio.to_thread(self._put, name, data)

    async def drop(self, name: str) -> None:
        """Forget bytes that turned out to be damaged."""
        with _errors():
            (self._folder / name).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Inside, no other reader of this node fetches what is called `name`, for TURN_S at most."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # without a lock everybody fetches: dearer, not wrong
                lock = stack.enter_context((self._folder / f".turn-{name[:2]}").open("ab"))
                until = time.monotonic() + TURN_S
                while not _locked(lock.fileno()) and time.monotonic() < until:  # noqa: ASYNC110 - another process's
                    await asyncio.sleep(POLL_S)
            yield

    def _get(self, name: str) -> bytes | None:
        path = self._folder / name
        with _errors():
            try:
                data = path.read_bytes()
                os.utime(path)  # used now
            except FileNotFoundError:
                return None
            return data

    def _put(self, name: str, data: Piece) -> None:
        path, temp = self._folder / name, self._folder / f"{TEMP}{os.getpid()}-{name[:8]}"
        with _errors(), (self._folder / ".lock").open("ab") as lock:
            until = time.monotonic() + LOCK_S
            while not _locked(lock.fileno()):
                if time.monotonic() > until:
                    raise Unavailable(f"{self._folder}: another process keeps the lock", "NODE_CACHE")
                time.sleep(POLL_S)
            if path.exists():
                return
            self._make_room(len(data))
            try:
                with temp.open("wb", buffering=0) as file:
                    view = memoryview(data)
                    while len(view):
                        view = view[file.write(view) :]
                temp.replace(path)
            finally:
                temp.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Delete orphans, then what was used longest ago, until `size` more bytes fit."""
        kept: list[tuple[float, int, str]] = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(TEMP):
                    Path(entry.path).unlink()
                elif not entry.name.startswith("."):
                    found = entry.stat()
                    kept.append((found.st_mtime, found.st_size, entry.path))
        total = size + sum(each for _, each, _ in kept)
        for _, each, path in sorted(kept):
            if total <= self._most:
                return
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
            total -= each


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = errno.errorcode.get(error.errno or 0, "OS")
        raise Unavailable(f"node cache: {error.strerror}: {error.filename}", reason) from error
