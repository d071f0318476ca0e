"""Checkpoints: what a trainer resumes from, written so that a crash at any moment leaves the last complete one in force.

Order, and what a crash leaves behind it:
    1 shards          <name>/weights.safetensors, optimizer.safetensors, random.safetensors    no manifest: ignored
    2 manifest        <name>/manifest.json, put_if_absent: names, sizes, CRC-32C               complete, but not in force
    3 read back       every byte is fetched and compared                                       complete, but not in force
    4 pointer         checkpoints/latest, conditional replace                                  in force
    5 commit          the buffer closes the ledger rows of the covered batches (the caller's)  as before
<name> = checkpoints/<step>-<incarnation>-<random>. The pointer also carries the highest incarnation that ever took over: a
trainer writes its own there before it trains, so a slower predecessor's replace conflicts, and it stops (Fenced).

Shards are plain safetensors files: any tool opens them, and a sharded writer can take their place without a new format.
"""

from __future__ import annotations

import asyncio
import json
import struct
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c

from services.trainer.learner import Snapshot
from slipstream import logs
from slipstream.errors import Conflict, Fenced, InvalidInput, NotFound, OutOfRange
from slipstream.manifest import RawTensor, checksum, layout
from slipstream.objects import ObjectStore, Piece

FOLDER = "checkpoints/"
POINTER = "checkpoints/latest"
SHARDS = ("weights", "optimizer", "random")
FORMAT = 1
CHUNK_BYTES = 1 << 18

log = logs.get("trainer.checkpoint")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Contents of checkpoints/latest. `name` is empty before the first checkpoint."""

    run: str
    incarnation: int
    name: str = ""
    step: int = 0
    ledger_sequence: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """A checkpoint without its tensors. `notes` is free: what the loop wants back, such as recent rewards."""

    name: str
    run: str
    step: int
    incarnation: int
    ledger_sequence: int
    ledger_epoch: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def manifest_key(self) -> str:
        return f"{self.name}/manifest.json"


class Checkpoints:
    """The checkpoints of one run, through the eyes of one trainer start."""

    def __init__(self, store: ObjectStore, run: str, keep: int) -> None:
        self._store, self._run, self._keep = store, run, keep
        self._pointer = Pointer(run, 0)
        self._tag: str | None = None

    @property
    def pointer(self) -> Pointer:
        return self._pointer

    async def open(self) -> Pointer:
        """Read the pointer. Raises InvalidInput when it is damaged or belongs to another run."""
        try:
            data, self._tag = await self._store.get_tagged(POINTER)
        except NotFound:
            self._pointer, self._tag = Pointer(self._run, 0), None
            return self._pointer
        try:
            self._pointer = Pointer(**json.loads(data))
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"{POINTER} is damaged: {error}; restore it, or take a new run.name", "POINTER") from error
        if self._pointer.run != self._run:
            raise InvalidInput(
                f"{POINTER} belongs to run {self._pointer.run!r}, not {self._run!r}; set another objects.url", "RUN")
        return self._pointer

    async def take_over(self, incarnation: int) -> None:
        """Write the incarnation into the pointer. Raises Fenced if a newer one is there, Conflict if it moved since `open`."""
        if self._pointer.incarnation >= incarnation:
            raise Fenced(f"incarnation {incarnation} is not above {self._pointer.incarnation} of {POINTER}", "FENCED")
        await self._point(Pointer(
            self._run, incarnation, self._pointer.name, self._pointer.step, self._pointer.ledger_sequence))

    async def load(self) -> tuple[Header, Snapshot] | None:
        """The checkpoint in force, every byte checked; None before the first.

        When it is damaged, the next older complete one by name. Raises InvalidInput when there were some but none is whole.
        """
        if not self._pointer.name:
            return None
        candidates = [self._pointer.name, *(n for n in await self._complete() if n != self._pointer.name)]
        for name in candidates:
            try:
                return await self._read(name)
            except (NotFound, InvalidInput, OutOfRange) as error:
                log.error(f"checkpoint {name} cannot be used: {error.message}", checkpoint=name)
        raise InvalidInput(
            f"none of {len(candidates)} checkpoints is whole ({', '.join(candidates)}); restore one, or take a new run.name",
            "CHECKPOINTS")

    async def save(
        self, snapshot: Snapshot, *, step: int, incarnation: int, ledger_sequence: int, ledger_epoch: int = 0,
        notes: dict[str, Any] | None = None,
    ) -> Header:
        """Write, read back, verify, put in force. Raises Fenced when a newer trainer has taken over."""
        name = f"{FOLDER}{step:08d}-{incarnation}-{uuid.uuid4().hex[:8]}"
        header = Header(name, self._run, step, incarnation, ledger_sequence, ledger_epoch, notes or {})
        objects = {}
        for shard in SHARDS:
            key = f"{name}/{shard}.safetensors"
            start, ordered, _ = await asyncio.to_thread(layout, getattr(snapshot, shard), key, {"format": "pt"})
            pieces: list[Piece] = [start, *(t.data for t in ordered)]
            size, crc = await asyncio.to_thread(_measured, pieces)
            objects[shard] = {"key": key, "size": size, "crc32c": crc}
            await self._store.put(key, pieces)
        text = json.dumps({"format": FORMAT, **asdict(header), "objects": objects}, indent=1).encode()
        if not await self._store.put_if_absent(header.manifest_key, text):
            raise Conflict(f"{header.manifest_key} exists already", "CHECKPOINT_EXISTS")
        await self._read(name, keep=False)
        await self._point(Pointer(self._run, incarnation, name, step, ledger_sequence))
        return header

    async def retain(self) -> list[str]:
        """Delete all but the newest complete ones and whatever is half written below them. Returns the deleted names.

        Manifests go first, so that nothing half deleted looks whole.
        """
        kept = set((await self._complete())[: self._keep]) | {self._pointer.name}
        oldest = min(kept)
        keys = [k for k in await self._store.list(FOLDER) if k != POINTER and _name(k) not in kept and _name(k) < oldest]
        for key in sorted(keys, key=lambda k: not k.endswith("/manifest.json")):
            await self._store.delete(key)
        return sorted({_name(k) for k in keys})

    async def _complete(self) -> list[str]:
        """Names of those with a manifest, newest first; none above the step in force: those are of a branch that was fenced."""
        names = [_name(k) for k in await self._store.list(FOLDER) if k.endswith("/manifest.json")]
        return sorted((n for n in names if _order(n)[0] <= self._pointer.step), key=_order, reverse=True)

    async def _read(self, name: str, keep: bool = True) -> tuple[Header, Snapshot]:
        """Every byte, checked. Without `keep` one shard at a time is in memory, and the snapshot comes back empty."""
        try:
            fields = json.loads(await self._store.get(f"{name}/manifest.json"))
            if fields.pop("format") != FORMAT or fields["run"] != self._run or fields["name"] != name:
                raise InvalidInput(f"{name}/manifest.json is of another format, run or checkpoint", "CHECKPOINT_MANIFEST")
            objects = fields.pop("objects")
            header = Header(**fields)
            entries = [objects[shard] for shard in SHARDS]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"{name}/manifest.json is not a manifest: {error!r}", "CHECKPOINT_MANIFEST") from error
        shards = []
        for entry in entries:
            data = await self._store.get(entry["key"])
            if len(data) != entry["size"] or await asyncio.to_thread(checksum, data) != entry["crc32c"]:
                raise InvalidInput(f"{entry['key']} is damaged", "CHECKPOINT_CHECKSUM", key=entry["key"])
            shards.append(parse_safetensors(data) if keep else [])
        return header, Snapshot(*shards)

    async def _point(self, pointer: Pointer) -> None:
        try:
            self._tag = await self._store.replace(POINTER, json.dumps(asdict(pointer)).encode(), self._tag)
        except Conflict as error:
            seen = Pointer(**json.loads((await self._store.get_tagged(POINTER))[0]))
            if seen.incarnation > pointer.incarnation:
                raise Fenced(
                    f"trainer incarnation {seen.incarnation} has taken over from {pointer.incarnation}; this one stops",
                    "FENCED", incarnation=pointer.incarnation) from error
            raise
        self._pointer = pointer


def parse_safetensors(data: bytes) -> list[RawTensor]:
    """The tensors of a safetensors file, in file order. https://huggingface.co/docs/safetensors/index#format"""
    (size,) = struct.unpack_from("<Q", data)
    table = json.loads(data[8 : 8 + size])
    table.pop("__metadata__", None)
    body = memoryview(data)[8 + size :]
    return [
        RawTensor(name, entry["dtype"], tuple(entry["shape"]), body[entry["data_offsets"][0] : entry["data_offsets"][1]])
        for name, entry in table.items()]


def _measured(pieces: Sequence[Piece]) -> tuple[int, int]:
    """(size, CRC-32C) of buffers written one after the other."""
    size = crc = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        size += len(view)
        for start in range(0, len(view), CHUNK_BYTES):  # google_crc32c takes bytes only: copies that fit the cache
            crc = google_crc32c.extend(crc, bytes(view[start : start + CHUNK_BYTES]))
    return size, crc


def _name(key: str) -> str:
    return key.rsplit("/", 1)[0]


def _order(name: str) -> tuple[int, int]:
    """(step, incarnation) of a checkpoint's name."""
    step, incarnation, _ = name.removeprefix(FOLDER).split("-", 2)
    return int(step), int(incarnation)
