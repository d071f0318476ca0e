"""Shards of a checkpoint in the object store: torch's distributed checkpointing (DCP) with a writer and a reader of ours.

DCP plans who writes which part of which tensor (replicated tensors once, each shard of a DTensor by its owner), carries a
failure on one rank to all, and plans reads for any other mesh. Ours is the storage: safetensors objects and a JSON description
instead of DCP's own files and pickles, so that file:// and S3 take the same path and any tool opens a shard.

    <folder>/<part>-<rank>.safetensors      part: weights, optimizer, random; a shard of a tensor is named <tensor>@<offsets>
    description                             {"objects": {file: size, CRC}, "tensors": {name: dtype, shape, chunks}}

DCP is synchronous and runs in a thread beside the event loop that owns the store: see `Bridge`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import google_crc32c
import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slipstream import logs
from slipstream.errors import InvalidInput, NotFound, OutOfRange, SlipstreamError
from slipstream.manifest import FileEntry, RawTensor, TensorEntry, layout, read_entries
from slipstream.model import bare, cooked, dtype_named
from slipstream.objects import ObjectStore, Piece

READ_BYTES = 128 << 20  # of a checkpoint in memory at a time, beside its destination
TRIES = 3  # times that a shard is written, or read, before its damage is believed

T = TypeVar("T")
Description = dict[str, Any]

log = logs.get("trainer.checkpoint")
logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.WARNING)  # DCP's own: two records a tensor at DEBUG
# One process without a process group is an ordinary case here, and is asked for by name.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


class Bridge:
    """The event loop, for a thread that runs beside it. After `close` every call raises, so that an abandoned thread ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._running: concurrent.futures.Future[Any] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs in the event loop."""
        if self._closed:
            work.close()
            raise concurrent.futures.CancelledError("the checkpoint was given up")
        self._running = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        if self._closed:
            future.cancel()
        return future.result()

    def close(self) -> None:
        """Cancel what runs and refuse what follows."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()


async def in_thread(work: Callable[[Bridge], T]) -> T:
    """Run DCP beside the event loop. Raises what failed on the first rank that failed, instead of DCP's wrapper."""
    bridge = Bridge()
    try:
        return await asyncio.to_thread(work, bridge)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise next((c for c in causes if isinstance(c, SlipstreamError)), causes[0]) from error
    finally:
        bridge.close()


def save(
    state: dict[str, torch.Tensor], folder: str, store: ObjectStore, bridge: Bridge, group: ProcessGroup | None,
    conclude: Callable[[str, Description], None],
) -> str:
    """Write, read back and compare this rank's shards of `<part>/<name>` tensors; rank 0 then concludes.

    `conclude` gets the folder and the description. Returns the folder, which rank 0 chose. Raises CheckpointException on every
    rank when any fails, `conclude` included.
    """
    writer = StoreWriter(folder, store, bridge, conclude)
    state_dict_saver.save(
        state, storage_writer=writer, process_group=group, no_dist=group is None,
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    return writer.folder


def load(
    state: dict[str, torch.Tensor], folder: str, description: Description, store: ObjectStore, bridge: Bridge,
    group: ProcessGroup | None,
) -> None:
    """Fill `state`, whose tensors may be sharded over another mesh than the one that wrote. Every byte used is checked."""
    state_dict_loader.load(
        state, storage_reader=StoreReader(folder, description, store, bridge), process_group=group, no_dist=group is None,
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))


def tensors(description: Description) -> Iterator[tuple[str, torch.Size, torch.dtype]]:
    """(`<part>/<name>`, global shape, dtype) of everything in a checkpoint."""
    for name, entry in description["tensors"].items():
        yield name, torch.Size(entry["shape"]), dtype_named(name, entry["dtype"])


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a chunk went, and the whole object that it is in."""

    entry: TensorEntry
    object: FileEntry


class StoreWriter(StorageWriter):
    """DCP's calls, in this order: set_up, plan on each rank, plan on rank 0, write_data on each rank, finish on rank 0."""

    def __init__(
        self, folder: str, store: ObjectStore, bridge: Bridge, conclude: Callable[[str, Description], None],
    ) -> None:
        self.folder, self._store, self._bridge, self._conclude = folder, store, bridge, conclude

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next: a writer is made for each."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: an object store has no folders."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0's folder is everybody's."""
        return [replace(plan, storage_data=(self.folder, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.folder, rank = plan.storage_data
        parts: dict[str, list[tuple[MetadataIndex, RawTensor]]] = defaultdict(list)
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
            if not tensor.numel() and item.tensor_data.size.numel():
                continue  # more ranks than rows: this one holds none
            part, _, name = item.index.fqn.partition("/")
            raw = bare(_chunk_name(name, tensor.shape, item.tensor_data.size, item.index.offset), tensor.contiguous())
            parts[part].append((item.index, raw))
        results = []
        for part, chunks in parts.items():
            results += self._write(f"{self.folder}/{part}-{rank:05d}.safetensors", chunks)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        described: dict[str, dict[str, Any]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            described[name] = {"shape": list(entry.size), "chunks": []}
        objects = {}
        for result in (r for rank in results for r in rank):
            stored: Stored = result.storage_data
            file = stored.object.key.rpartition("/")[2]
            objects[file] = {"size": stored.object.size, "crc32c": stored.object.crc32c}
            described[result.index.fqn]["dtype"] = stored.entry.dtype
            described[result.index.fqn]["chunks"].append({
                "offsets": list(result.index.offset or ()), "shape": list(stored.entry.shape), "file": file,
                "offset": stored.entry.offset, "size": stored.entry.size, "crc32c": stored.entry.crc32c})
        self._conclude(self.folder, {"ranks": len(results), "objects": objects, "tensors": described})

    def _write(self, key: str, chunks: Sequence[tuple[MetadataIndex, RawTensor]]) -> list[WriteResult]:
        """One object, written until what is there is what was meant."""
        start, ordered, entries = layout([raw for _, raw in chunks], key, {"format": "pt"})
        pieces: list[Piece] = [start, *(raw.data for raw in ordered)]
        meant = FileEntry(key, *_measured(pieces))
        for number in range(1, TRIES + 1):
            self._bridge.run(self._store.put(key, pieces))
            if self._found(meant) == meant:
                break
            log.warning(f"{key} was not written as it was sent, try {number} of {TRIES}", key=key)
        else:
            raise InvalidInput(
                f"{key} is damaged as soon as it is written: check the object store", "CHECKPOINT_CHECKSUM", key=key)
        indices = {raw.name: index for index, raw in chunks}
        return [WriteResult(indices[e.name], e.size, Stored(e, meant)) for e in entries]

    def _found(self, meant: FileEntry) -> FileEntry:
        """What reading the object gives, in pieces."""
        crc = size = 0
        try:
            while size < meant.size:
                data = self._bridge.run(self._store.get(meant.key, size, min(READ_BYTES // 4, meant.size - size)))
                crc, size = google_crc32c.extend(crc, data), size + len(data)
        except (NotFound, OutOfRange):
            return FileEntry(meant.key, size, -1)
        return FileEntry(meant.key, size, crc)


class StoreReader(StorageReader):
    """Reads what a description names; DCP decides which parts of which chunks this rank needs."""

    def __init__(self, folder: str, description: Description, store: ObjectStore, bridge: Bridge) -> None:
        self._folder, self._description, self._store, self._bridge = folder, description, store, bridge

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next: a reader is made for each."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({
            name: TensorStorageMetadata(
                TensorProperties(dtype=dtype), shape,
                [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["shape"]))
                 for c in self._description["tensors"][name]["chunks"]])
            for name, shape, dtype in tensors(self._description)})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: the description came with the manifest."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = defaultdict(list)
        for item in plan.items:
            offsets = tuple(item.storage_index.offset or ())
            wanted[f"{item.storage_index.fqn}@{offsets}"].append(item)
        for entries in _portions([e for e in self._entries() if e.name in wanted]):
            for raw in self._read(entries):
                chunk = cooked(raw)
                for item in wanted[raw.name]:
                    target = planner.resolve_tensor(item).detach()
                    part = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    target.copy_(chunk[part])
                    planner.commit_tensor(item, target)
        return _done(None)

    def _entries(self) -> list[TensorEntry]:
        """Every chunk, in the order of the objects."""
        return sorted((
            TensorEntry(
                f"{name}@{tuple(c['offsets'])}", entry["dtype"], tuple(c["shape"]), f"{self._folder}/{c['file']}", c["offset"],
                c["size"], c["crc32c"])
            for name, entry in self._description["tensors"].items() for c in entry["chunks"]), key=lambda e: (e.key, e.offset))

    def _read(self, entries: list[TensorEntry]) -> list[RawTensor]:
        """Read again before damage is believed: it may have happened on the way."""
        for _ in range(TRIES - 1):
            try:
                return self._bridge.run(read_entries(self._store, entries, self._folder))
            except NotFound:
                raise
            except InvalidInput as error:
                log.warning(f"{error.message}; reading it again", key=entries[0].key)
        return self._bridge.run(read_entries(self._store, entries, self._folder))


def _chunk_name(name: str, shape: torch.Size, whole: torch.Size, offsets: torch.Size | None) -> str:
    return name if shape == whole else f"{name}@{','.join(map(str, offsets or ()))}"


def _portions(entries: Sequence[TensorEntry]) -> Iterator[list[TensorEntry]]:
    """Up to READ_BYTES of neighbours at a time."""
    portion: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if portion and size + entry.size > READ_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(entry)
        size += entry.size
    if portion:
        yield portion


def _measured(pieces: Sequence[Piece]) -> tuple[int, int]:
    """(size, CRC-32C) of buffers written one after the other."""
    size = crc = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        size += len(view)
        for start in range(0, len(view), 1 << 18):  # google_crc32c takes bytes only: copies that fit the cache
            crc = google_crc32c.extend(crc, bytes(view[start : start + (1 << 18)]))
    return size, crc


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future
