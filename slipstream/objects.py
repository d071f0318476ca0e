"""The object store: where versions, checkpoints and the batch log live. One protocol, two stores, one contract suite.

`file://` (FileStore, here) and `s3://` (slipstream.s3.S3Store, imported only when asked for). Both give what everything else
is built on: a reader never sees a torn write, of many `put_if_absent` of one key exactly one wins, and `replace` changes a key
only if nobody else did. A key is written either by `put` or by `replace`, never by both.

Keys are relative paths such as "versions/00000007-1/manifest.json": letters, digits and ._=+@- between slashes, no part
starting with a dot.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

from slipstream.errors import ConfigError, Conflict, Exhausted, InvalidInput, NotFound, OutOfRange, SlipstreamError, Unavailable

T = TypeVar("T")
Piece: TypeAlias = "bytes | bytearray | memoryview[int]"
# What can be written: one buffer, or several that are written one after the other without being joined first.
Data: TypeAlias = "Piece | list[Piece] | tuple[Piece, ...]"

INLINE_BYTES = 1 << 20  # file IO below this runs in the event loop, which is cheaper than a thread, unless it waits for fsync
SYNC_BYTES = 4 << 20  # a large object reaches the disk in portions: one long flush would hold up everybody else's short ones
_KEY = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*")
_PREFIX = re.compile(r"([A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*(/|$))*")


class ObjectStore(Protocol):
    """Objects by key. Any method raises InvalidInput for a bad key and Unavailable when the store cannot be reached."""

    url: str

    async def put(self, key: str, data: Data, durable: bool = True) -> None:
        """Write or overwrite. `durable`: return only once it survives a power loss."""
        ...

    async def put_if_absent(self, key: str, data: Data) -> bool:
        """Write if the key does not exist, durably; False when it does. Atomic: of many writers exactly one gets True.

        Make `data` unique to the writer when the winner matters: after a lost reply the store is asked whose bytes are there.
        """
        ...

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        """The bytes [offset, offset + size), or to the end. Raises NotFound; OutOfRange when the object is shorter."""
        ...

    async def get_tagged(self, key: str) -> tuple[bytes, str]:
        """The whole object and the tag of this content, for `replace`. Raises NotFound."""
        ...

    async def replace(self, key: str, data: Data, tag: str | None) -> str:
        """Write if the key still has `tag` (None: if it does not exist), durably. Returns the new tag. Raises Conflict."""
        ...

    async def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted."""
        ...

    async def delete(self, key: str) -> None:
        """Remove; a missing key is fine."""
        ...

    async def probe(self) -> None:
        """Check at start that the store is writable and honours conditions. Raises ConfigError naming the remedy."""
        ...


@contextlib.asynccontextmanager
async def open_store(url: str, endpoint: str = "", region: str = "us-east-1") -> AsyncIterator[ObjectStore]:
    """The store behind file:///path or s3://bucket/prefix. Raises ConfigError for another scheme."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = url[len("file://") :]  # taken as it is: a folder's name may hold %, ? and #
        if not path.startswith("/"):
            raise ConfigError(f"objects.url = {url!r}: a file URL has three slashes and an absolute path, as in file:///data/run")
        yield FileStore(path)
    elif parts.scheme == "s3":
        if not parts.netloc:
            raise ConfigError(f"objects.url = {url!r}: the bucket is missing; write s3://bucket/prefix")
        try:
            from slipstream import s3
        except ImportError as error:
            raise ConfigError(f"objects.url = {url!r} needs the package {error.name!r}: pip install 'slipstream[s3]'") from None
        async with s3.open_s3(parts.netloc, parts.path.strip("/"), endpoint, region) as store:
            yield store
    else:
        raise ConfigError(f"objects.url = {url!r}: the scheme {parts.scheme!r} is not one of file, s3")


def check_key(key: str) -> str:
    """The key itself. Raises InvalidInput when it could leave the store or hide in it."""
    if not _KEY.fullmatch(key) or len(key) > 900:
        raise InvalidInput(
            f"object key {key[:80]!r} is not a relative path of letters, digits and ._=+@- whose parts do not start with a dot",
            "OBJECT_KEY", key=key[:80])
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself. Raises InvalidInput."""
    if not _PREFIX.fullmatch(prefix):
        raise InvalidInput(f"object prefix {prefix[:80]!r} cannot start an object key", "OBJECT_KEY", prefix=prefix[:80])
    return prefix


def check_range(key: str, offset: int, size: int | None) -> None:
    """Raises InvalidInput for a negative offset or size."""
    if offset < 0 or (size is not None and size < 0):
        raise InvalidInput(f"{key}: offset {offset} and size {size} must not be negative", "OBJECT_RANGE", key=key)


def pieces(data: Data) -> list[Piece]:
    """What is to be written as a list of flat byte buffers."""
    several = data if isinstance(data, list | tuple) else [data]
    return [p if isinstance(p, bytes) else _flat(p) for p in several if memoryview(p).nbytes]


async def probe_conditions(store: ObjectStore) -> None:
    """Write, race and read back a small object. Raises ConfigError when conditions are ignored."""
    key = f"probe/{os.urandom(8).hex()}"
    try:
        won = [await store.put_if_absent(key, b"first"), await store.put_if_absent(key, b"second")]
        data, tag = await store.get_tagged(key)
        replaced = await store.replace(key, b"third", tag)
        try:
            await store.replace(key, b"fourth", tag)
            stale_refused = replaced == tag
        except Conflict:
            stale_refused = True
        if won != [True, False] or data != b"first" or not stale_refused:
            raise ConfigError(
                f"object store {store.url} ignores conditional writes (If-None-Match, If-Match), so two trainers could "
                "overwrite each other: use a store that honours them, such as AWS S3 or file://")
        await store.delete(key)
    except ConfigError:
        raise
    except SlipstreamError as error:
        raise ConfigError(f"object store {store.url} cannot be used: {error.message}") from None


class FileStore:
    """Objects as files under a folder. Temp file + rename, so that a reader sees the old or the new and nothing between.

    `put_if_absent` is link(2), which fails when the name exists. `replace` holds flock on one file of the store while it
    compares and renames. Tags are SHA-256 of the content. Works on local disks and on NFS v4.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).absolute()
        self._numbers = itertools.count()
        self.url = f"file://{self._root}"

    async def put(self, key: str, data: Data, durable: bool = True) -> None:
        path, parts = self._path(key), pieces(data)
        await self._io(_bytes(parts), durable, self._write, path, parts, durable, os.replace)

    async def put_if_absent(self, key: str, data: Data) -> bool:
        path, parts = self._path(key), pieces(data)
        if path.exists():  # the common case of a repeat, without writing
            return False
        try:
            await self._io(_bytes(parts), True, self._write, path, parts, True, os.link)
        except FileExistsError:
            return False
        return True

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        path = self._path(key)
        check_range(key, offset, size)
        if size is None:
            try:
                size = max(0, path.stat().st_size - offset)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"object {key} does not exist in {self.url}", "OBJECT", key=key) from None
            if not size and offset:
                raise OutOfRange(f"object {key} has no byte {offset}", "OBJECT_RANGE", key=key)
        return await self._io(size, False, self._read, path, key, offset, size)

    async def get_tagged(self, key: str) -> tuple[bytes, str]:
        data = await self.get(key)
        return data, hashlib.sha256(data).hexdigest()

    async def replace(self, key: str, data: Data, tag: str | None) -> str:
        path, parts = self._path(key), pieces(data)
        return await self._io(_bytes(parts), True, self._replace, path, key, parts, tag)

    async def list(self, prefix: str) -> list[str]:
        check_prefix(prefix)
        folder = self._root / prefix[: prefix.rfind("/") + 1]
        keys = (str(path.relative_to(self._root)) for path in _walk(folder))
        return sorted(key for key in keys if key.startswith(prefix))

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(key):
            path.unlink(missing_ok=True)
            for parent in path.parents:  # empty folders go too; rmdir refuses one that is not
                if parent == self._root or parent.name.startswith("."):
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break

    async def probe(self) -> None:
        await probe_conditions(self)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    async def _io(self, size: int, syncs: bool, function: Callable[..., T], *arguments: Any) -> T:
        """Run quick IO here and the rest in a thread, with errors of the operating system sorted."""
        with self._errors(str(arguments[0])):
            if size < INLINE_BYTES and not syncs:
                return function(*arguments)
            return await asyncio.to_thread(function, *arguments)

    @contextlib.contextmanager
    def _errors(self, place: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            kind = Exhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
            raise kind(f"{place}: {error.strerror}", errno.errorcode.get(error.errno or 0, "OS"), path=place) from error

    def _write(self, path: Path, parts: list[Piece], durable: bool, place) -> None:
        """Write a temp file beside `path` and move it there by `place` (os.replace or os.link)."""
        temp = path.with_name(f".{path.name}.{os.getpid()}-{next(self._numbers)}-{os.urandom(4).hex()}")
        file, made = _open_new(temp)
        written = 0  # since the last sync
        try:
            with file:
                for portion in _portions(parts):
                    written += file.write(portion)
                    if durable and written >= SYNC_BYTES:
                        _sync(file)
                        written = 0
                if durable:
                    _sync(file)
            place(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        if durable:
            for folder in [path.parent, *(m.parent for m in made)]:
                _sync_folder(folder)

    @staticmethod
    def _read(path: Path, key: str, offset: int, size: int) -> bytes:
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(size)
                while len(data) < size and (more := file.read(size - len(data))):  # one read(2) gives at most 2 GB
                    data += more
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFound(f"object {key} does not exist", "OBJECT", key=key) from None
        if len(data) < size:
            raise OutOfRange(
                f"object {key} ends at byte {offset + len(data)}, before {offset + size}", "OBJECT_RANGE", key=key)
        return data

    def _replace(self, path: Path, key: str, parts: list[Piece], tag: str | None) -> str:
        _make_folder(self._root)
        with (self._root / ".replace.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a crash
            current = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
            if current != tag:
                raise Conflict(f"object {key} was changed by somebody else", "OBJECT_TAG", key=key, expected=tag, found=current)
            self._write(path, parts, True, os.replace)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return digest.hexdigest()


def _flat(piece: Piece) -> memoryview:
    """Any contiguous buffer as bytes, without a copy."""
    return memoryview(piece).cast("B")


def _portions(parts: list[Piece]) -> Iterator[Piece]:
    """The parts, with those above SYNC_BYTES cut up."""
    for part in parts:
        if len(part) <= SYNC_BYTES:
            yield part
        else:
            yield from (memoryview(part)[start:start + SYNC_BYTES] for start in range(0, len(part), SYNC_BYTES))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bytes(parts: list[Piece]) -> int:
    return sum(map(len, parts))


def _walk(folder: Path) -> Iterator[Path]:
    """Files below a folder, without hidden ones: temp files and locks."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _open_new(path: Path) -> tuple[BinaryIO, list[Path]]:
    """A new file for writing, and the folders that were made for it."""
    for _ in range(100):
        made = _make_folder(path.parent)
        try:
            return path.open("xb"), made
        except FileNotFoundError:  # a concurrent delete removed the empty folder
            continue
    raise FileNotFoundError(errno.ENOENT, "the folder vanishes as fast as it is made", str(path.parent))


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents. Returns those that were missing."""
    missing = list(itertools.takewhile(lambda f: not f.is_dir(), (folder, *folder.parents)))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    return missing


def _sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
