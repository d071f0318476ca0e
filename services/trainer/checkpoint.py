"""Checkpoints: what a trainer resumes from, written so that a crash at any moment leaves the last complete one in force.

Order, and what a crash leaves behind it:
    1 shards       <name>/<part>-<rank>.safetensors, by every rank beside the others       no manifest: ignored
    2 read back    every byte of them is fetched and compared, by the rank that wrote it    no manifest: ignored
    3 manifest     <name>/manifest.json, put_if_absent: files, tensors, sizes, CRC-32C     complete, but not in force
    4 pointer      checkpoints/latest, conditional replace                                  in force
    5 commit       the buffer closes the ledger rows of the covered batches (the caller's)  as before
<name> = checkpoints/<step>-<incarnation>-<random>. The pointer also carries the highest incarnation that ever took over: a
trainer writes its own there before it trains, so a slower predecessor's replace conflicts, and it stops (Fenced).

Manifest and pointer carry a checksum of themselves. The shards are services.trainer.shards: a checkpoint of one mesh loads on
any other. With several ranks each has a `Checkpoints` and calls `load` and `save` together with the others; rank 0 alone takes
over and retains.

The ledger's recovery snapshot is the batch log: its headers name every draw of the batches up to and beyond this checkpoint,
so they are newer than anything it could hold; with the ledger epoch and sequence kept here the buffer rebuilds a lost ledger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import torch
from torch.distributed import ProcessGroup

from services.trainer import shards
from services.trainer.snapshot import PARTS, Allocate, Snapshot, whole
from slipstream import formats, logs
from slipstream.errors import Conflict, Fenced, InvalidInput, NotFound, OutOfRange
from slipstream.objects import ObjectStore

FOLDER = "checkpoints/"
POINTER = "checkpoints/latest"
FORMAT = 2

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

    def __init__(self, store: ObjectStore, run: str, keep: int, group: ProcessGroup | None = None) -> None:
        """`group`: all ranks of the trainer, used for nothing else, for it works beside the step; None = one process."""
        self._store, self._run, self._keep, self._group = store, run, keep, group
        self._pointer = Pointer(run, 0)
        self._tag: str | None = None
        self._saving = threading.Lock()  # one that was given up ends before the next begins: its ranks are in step
        self._sent: list[Pointer] = []  # of `save`, without a clear answer: their names are nobody else's

    @property
    def pointer(self) -> Pointer:
        return self._pointer

    async def open(self) -> Pointer:
        """Read the pointer. Raises InvalidInput when it is damaged or belongs to another run."""
        try:
            fields, self._tag = await self._unsealed(POINTER)
        except NotFound:
            self._pointer, self._tag = Pointer(self._run, 0), None
            return self._pointer
        self._pointer = _pointer(fields)
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

    async def load(self, allocate: Allocate = whole) -> tuple[Header, Snapshot] | None:
        """The checkpoint in force, every byte checked; None before the first. `allocate` says where tensors go.

        When it is damaged, the next older complete one by name. Raises InvalidInput when there were some but none is whole.
        """
        if not self._pointer.name:
            return None
        return await self._first_whole(
            [self._pointer.name, *(n for n in await self._complete() if n != self._pointer.name)], allocate)

    async def load_at(self, step: int, allocate: Allocate = whole) -> tuple[Header, Snapshot]:
        """The newest whole checkpoint at or below `step`. Raises NotFound without one, InvalidInput when none is whole."""
        if not (candidates := [n for n in await self._complete() if _order(n)[0] <= step]):
            raise NotFound(f"no checkpoint at or below step {step}; there are {await self.steps()}", "NO_CHECKPOINT", step=step)
        return await self._first_whole(candidates, allocate)

    async def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted({_order(name)[0] for name in await self._complete()})

    async def save(
        self, snapshot: Snapshot, *, step: int, incarnation: int, ledger_sequence: int, ledger_epoch: int = 0,
        notes: dict[str, Any] | None = None,
    ) -> Header:
        """Write, read back, verify, put in force. Raises Fenced when a newer trainer has taken over."""
        folder = f"{FOLDER}{step:08d}-{incarnation}-{uuid.uuid4().hex[:8]}"
        state = {f"{part}/{name}": tensor for part in PARTS for name, tensor in getattr(snapshot, part).items()}

        def header(name: str) -> Header:
            return Header(name, self._run, step, incarnation, ledger_sequence, ledger_epoch, notes or {})

        def work(bridge: shards.Bridge) -> str:
            with self._saving:
                return shards.save(
                    state, folder, self._store, bridge, self._group,
                    lambda name, description: bridge.run(self._conclude(header(name), description)))

        return header(await shards.in_thread(work))

    async def retain(self) -> list[str]:
        """Delete all but the first and the newest complete ones, and whatever is half written below these. Returns their names.

        The first is kept for ever: replay starts there. Manifests go first, so that nothing half deleted looks whole.
        """
        complete = await self._complete()
        newest = {*complete[: self._keep], self._pointer.name}
        first = next((n for n in complete if _order(n)[0] == _order(complete[-1])[0]), "")
        keys = [k for k in await self._store.list(FOLDER) if k != POINTER]
        old = [k for k in keys if _name(k) not in newest and _name(k) != first and _name(k) < min(newest)]
        for key in sorted(old, key=lambda k: not k.endswith("/manifest.json")):
            await self._store.delete(key)
        return sorted({_name(k) for k in old})

    async def _complete(self) -> list[str]:
        """Names of those with a manifest, newest first; none above the step in force: those are of a branch that was fenced."""
        names = [_name(k) for k in await self._store.list(FOLDER) if k.endswith("/manifest.json")]
        return sorted((n for n in names if _order(n)[0] <= self._pointer.step), key=_order, reverse=True)

    async def _first_whole(self, names: Sequence[str], allocate: Allocate) -> tuple[Header, Snapshot]:
        for name in names:
            try:
                return await self._read(name, allocate)
            except (NotFound, InvalidInput, OutOfRange) as error:
                if error.reason == "FORMAT":  # not damage: an older one would be before the last commit
                    raise
                log.error(f"checkpoint {name} cannot be used: {error.message}", checkpoint=name)
        raise InvalidInput(
            f"none of {len(names)} checkpoints is whole ({', '.join(names)}); restore one, or take a new run.name",
            "CHECKPOINTS")

    async def _conclude(self, header: Header, description: shards.Description) -> None:
        """On rank 0, once every shard of every rank was read back: the manifest, and then the pointer."""
        text = sealed({"format": FORMAT, **asdict(header), **description})
        if not await self._store.put_if_absent(header.manifest_key, text):
            raise Conflict(f"{header.manifest_key} exists already", "CHECKPOINT_EXISTS")
        await self._manifest(header.name)
        pointer = Pointer(self._run, header.incarnation, header.name, header.step, header.ledger_sequence)
        self._sent.append(pointer)
        await self._point(pointer)
        self._sent.clear()

    async def _manifest(self, name: str) -> tuple[Header, shards.Description]:
        key = f"{name}/manifest.json"
        fields, _ = await self._unsealed(key)
        formats.known(key, fields.get("format"), FORMAT)
        if fields["run"] != self._run or fields["name"] != name:
            raise InvalidInput(f"{key} is of another run or checkpoint", "CHECKPOINT_MANIFEST")
        names = [f.name for f in dataclasses.fields(Header) if f.name in fields]  # a later release may have added some
        return Header(**{name: fields.pop(name) for name in names}), fields

    async def _unsealed(self, key: str) -> tuple[dict[str, Any], str]:
        """Contents and tag. Read again before damage is believed: it may have happened on the way."""
        for _ in range(shards.TRIES - 1):
            data, tag = await self._store.get_tagged(key)
            with contextlib.suppress(InvalidInput):
                return unsealed(key, data), tag
        data, tag = await self._store.get_tagged(key)
        return unsealed(key, data), tag

    async def _read(self, name: str, allocate: Allocate) -> tuple[Header, Snapshot]:
        header, description = await self._manifest(name)
        return header, await self.filled(name, description, allocate, self._group)

    async def filled(
        self, name: str, description: shards.Description, allocate: Allocate, group: ProcessGroup | None,
    ) -> Snapshot:
        """What a manifest describes, every byte checked. Raises NotFound, InvalidInput, OutOfRange; on all ranks of `group`."""
        parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in PARTS}
        for key, shape, dtype in shards.tensors(description):
            part, _, tensor = key.partition("/")
            if (target := allocate(part, tensor, shape, dtype)) is not None:
                parts[part][tensor] = target
        state = {f"{part}/{tensor}": target for part in PARTS for tensor, target in parts[part].items()}
        await shards.in_thread(
            lambda bridge: shards.load(state, name, description, self._store, bridge, group))
        return Snapshot(**parts)

    async def _point(self, pointer: Pointer) -> None:
        data = sealed(asdict(pointer))
        while True:
            try:
                self._tag = await self._store.replace(POINTER, data, self._tag)
                break
            except Conflict as error:
                fields, tag = await self._unsealed(POINTER)
                seen = _pointer(fields)
                if seen.incarnation > pointer.incarnation:
                    raise Fenced(
                        f"trainer incarnation {seen.incarnation} has taken over from {pointer.incarnation}; this one stops",
                        "FENCED", incarnation=pointer.incarnation) from error
                if seen not in self._sent or tag == self._tag:
                    raise
                self._tag = tag  # an earlier write of this one took effect, though its answer was lost
        self._pointer = pointer


def sealed(fields: dict[str, Any]) -> bytes:
    """A small JSON object with a checksum of itself."""
    text = json.dumps(fields, indent=1)
    return json.dumps({**fields, "crc32c": google_crc32c.value(text.encode())}, indent=1).encode()


def unsealed(key: str, data: bytes) -> dict[str, Any]:
    """The inverse of `sealed`. Raises InvalidInput when anything was changed."""
    try:
        fields = json.loads(data)
        crc = fields.pop("crc32c")
        if crc == google_crc32c.value(json.dumps(fields, indent=1).encode()):
            return fields
        problem = "its checksum differs"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = repr(error)
    raise InvalidInput(f"{key} is damaged: {problem}; restore it, or take a new run.name", "CHECKPOINT_JSON", key=key)


def _pointer(fields: dict[str, Any]) -> Pointer:
    """A pointer, of whatever release: what a later one added is passed over."""
    return Pointer(**{f.name: fields[f.name] for f in dataclasses.fields(Pointer) if f.name in fields})


def _name(key: str) -> str:
    return key.rsplit("/", 1)[0]


def _order(name: str) -> tuple[int, int]:
    """(step, incarnation) of a checkpoint's name."""
    step, incarnation, _ = name.removeprefix(FOLDER).split("-", 2)
    return int(step), int(incarnation)
