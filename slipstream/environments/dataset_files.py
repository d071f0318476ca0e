"""Files of a dataset, on disk or in S3, and their rows: JSONL, Parquet, Arrow. pyarrow is imported only for the latter two."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slipstream.environment import nearest
from slipstream.errors import ConfigError, NotFound, SlipstreamError
from slipstream.objects import ObjectStore, open_store

Rows = Sequence[dict[str, Any]]
FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
_SPLIT_DICT, _STATE = "dataset_dict.json", "state.json"
_SPLIT = re.compile(r"(train|test|validation|valid|dev)(?=[-.])")


async def read(path: str, split: str, endpoint: str, region: str) -> Rows:
    """All rows at `path`. Raises ConfigError naming what is missing and what there is instead."""
    if not path.startswith("s3://"):
        return await _rows(_Folder(Path(path.removeprefix("file://"))), path, split)
    bucket, _, key = path.removeprefix("s3://").partition("/")
    async with open_store(f"s3://{bucket}", endpoint, region) as store:
        try:
            return await _rows(_Bucket(store, key.rstrip("/")), path, split)
        except ConfigError:
            raise
        except SlipstreamError as error:
            raise ConfigError(f"environments.args.path = {path!r} cannot be read: {error.message}") from None


async def of_sft(settings: Any) -> Rows:
    """The dataset of a run file's [sft]. Raises ConfigError for a path, split or column that is not there, and for no rows."""
    try:
        found = await read(settings.path, settings.split, settings.endpoint, settings.region)
    except ConfigError as error:  # the reader's own words are of an environment's arguments
        raise ConfigError(error.message.replace("environments.args.", "sft.").replace("args.", "sft.")) from None
    if not found:
        raise ConfigError(f"sft.path = {settings.path!r} has no rows; at least two are needed")
    return found


class _Place(Protocol):
    """A file or folder: "" names itself, other names are relative paths of files below it."""

    async def get(self, name: str) -> bytes:
        """The content. Raises NotFound; for a folder too."""
        ...

    async def names(self) -> list[str]:
        """Files below the folder, sorted; none when it does not exist."""
        ...


class _Folder:
    def __init__(self, root: Path) -> None:
        self._root = root

    async def get(self, name: str) -> bytes:
        path = self._root / name if name else self._root
        try:
            return path.read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise NotFound(f"{path} is no file") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    async def names(self) -> list[str]:
        files = (p for p in self._root.rglob("*") if p.is_file())
        return sorted(str(p.relative_to(self._root)) for p in files if not p.name.startswith("."))


class _Bucket:
    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key

    async def get(self, name: str) -> bytes:
        return await self._store.get("/".join(part for part in (self._key, name) if part))

    async def names(self) -> list[str]:
        prefix = f"{self._key}/" if self._key else ""
        return [key.removeprefix(prefix) for key in await self._store.list(prefix)]


async def _rows(place: _Place, path: str, split: str) -> Rows:
    if path.endswith(FORMATS):
        try:
            return parse(path, await place.get(""))
        except NotFound:
            pass  # a folder may be called anything; if it is none either, the error below says so
    names = await place.names()
    chosen = await _chosen(place, names, path, split)
    return [row for name in chosen for row in parse(f"{path}/{name}", await place.get(name))]


async def _chosen(place: _Place, names: list[str], path: str, split: str) -> list[str]:
    """The files that make up the dataset: those of the split, and of them those that state.json lists."""
    data = [n for n in names if n.endswith((".jsonl", ".parquet", ".arrow"))]
    if not data:
        seen = f"it holds {', '.join(names[:5])}" if names else _beside(path)
        raise ConfigError(
            f"environments.args.path = {path!r} is neither a file nor a folder of {', '.join(FORMATS)}: {seen}")
    splits = sorted({s for n in data if (s := _split_of(n, _SPLIT_DICT in names))})
    if split and split not in splits:
        raise ConfigError(f"environments.args.split = {split!r}: {path} has no such split; {nearest(split, splits)}")
    if len(splits) > 1 and not split:
        raise ConfigError(f"environments.args.path = {path!r} has splits {', '.join(splits)}: choose one with args.split")
    data = [n for n in data if not split or _split_of(n, _SPLIT_DICT in names) == split]
    for state in (n for n in names if n.rpartition("/")[2] == _STATE):
        folder = state[: -len(_STATE)]
        listed = {folder + f["filename"] for f in json.loads(await place.get(state)).get("_data_files", ())}
        data = [n for n in data if n.rpartition("/")[0] != folder.rstrip("/") or n in listed]
    return data


def _split_of(name: str, saved: bool) -> str:
    """The split of a file: its folder when `datasets` saved a dictionary of splits, else how its name begins."""
    if saved:
        return name.partition("/")[0]
    found = _SPLIT.match(name.rpartition("/")[2])
    return found[1] if found else ""


def _beside(path: str) -> str:
    """Why there is nothing at `path`, and what its folder holds."""
    if path.startswith("s3://"):
        return "it does not exist; check bucket and key"
    if Path(path).is_dir():
        return "it is empty"
    folder = Path(path).absolute().parent
    hint = nearest(Path(path).name, [p.name for p in folder.iterdir()][:50]) if folder.is_dir() else f"{folder} neither"
    return f"it does not exist; {hint}"


def parse(name: str, data: bytes) -> Rows:
    """The rows of one file, by its ending. Raises ConfigError naming file, line and remedy."""
    if name.endswith((".jsonl", ".json")):
        return _jsonl(name, data)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{name} needs the package pyarrow: pip install 'slipstream[data]'") from None
    try:
        if name.endswith(".parquet"):
            return pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
        opened = pyarrow.ipc.open_file(data) if data.startswith(b"ARROW1") else pyarrow.ipc.open_stream(data)
        return opened.read_all().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{name} cannot be read as {name.rpartition('.')[2]}: {str(error).splitlines()[0]}") from None


def _jsonl(name: str, data: bytes) -> Rows:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{name}, line {number} is not JSON: {error}; one object a line is needed") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{name}, line {number} is a {type(row).__name__}; one object a line is needed")
        rows.append(row)
    return rows
