"""Checkpoints of a trainer on ranks: every rank writes and reads its own shards, and no tensor is ever gathered for one.

    rank 0    loop ─► Lead.snapshot ─► every rank copies its shards      loop ─► Led.save ──► DCP: shards, manifest, pointer
    others              └─► Follower.snapshot ─► a thread that takes part in that save, and in its repetitions, beside the steps

    rank 0    loop ─► Led.load: manifest ─"read"─► every rank fills its shards (DCP) ─► Lead.load ─"load"─► in force on all

Consumes     this rank's snapshot; at a start the manifest that rank 0 has read.
Produces     this rank's objects of a checkpoint; rank 0 alone writes manifest and pointer, after all were read back.
Waits for    the other ranks, in a group of its own, for trainer.parallel.start_timeout_s.
Unblocked by rank 0: it saves until it succeeds, or ends; its end closes the connections.

What fails on one rank is raised on all (DCP), so the ranks begin the same number of saves and of reads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from services.trainer.checkpoint import Checkpoints, Header
from services.trainer.parallel import mesh
from services.trainer.shards import Description
from services.trainer.snapshot import Allocate, Snapshot, named, whole
from slipstream import config, logs
from slipstream.errors import Fenced, SlipstreamError
from slipstream.objects import ObjectStore, open_store

END_S = 10.0  # a follower waits this long for the last checkpoint at its end; rank 0 has given it up then

log = logs.get("trainer.checkpoint")


class Leading(Protocol):
    """What `Led` needs of rank 0's learner."""

    @property
    def background(self) -> ProcessGroup:
        """All ranks, beside the steps."""
        ...

    def begin(self, name: str, *arguments: Any) -> None:
        """Have the followers begin a call of this name; nothing else is asked of them until `end`."""
        ...

    def end(self) -> None:
        """It has ended on all ranks."""
        ...

    def allocate(self) -> Allocate:
        """Where rank 0's shards go."""
        ...


class Led(Checkpoints):
    """Rank 0's: `save` and `load` are those of all ranks."""

    def __init__(self, store: ObjectStore, run: str, keep: int, lead: Leading) -> None:
        super().__init__(store, run, keep, lead.background)
        self._lead = lead

    async def load(self, allocate: Allocate = whole) -> tuple[Header, Snapshot] | None:
        """Every rank's shards, to where its learner has them; `allocate` is the learner's."""
        return await super().load(self._lead.allocate())

    async def _read(self, name: str, allocate: Allocate) -> tuple[Header, Snapshot]:
        """Of all ranks for `load`; `load_at` reads whole tensors, on rank 0 alone."""
        header, description = await self._manifest(name)
        if allocate is whole:
            return header, await self.filled(name, description, allocate, None)
        await asyncio.to_thread(self._lead.begin, "read", name, description)
        try:
            return header, await self.filled(name, description, allocate, self._group)
        finally:
            self._lead.end()


class Follower:
    """Another rank's part in it. `learner` has `snapshot`, `load` and `allocate` of its own shards."""

    def __init__(self, run: config.RunFile, learner: Any, group: ProcessGroup) -> None:
        self._run, self._learner, self._group = run, learner, group
        self._read: Snapshot | None = None
        self._saving: threading.Thread | None = None

    def snapshot(self) -> None:
        """Copy this rank's shards, and write them as soon as rank 0 does."""
        snapshot = self._learner.snapshot()
        if self._saving is not None:
            self._saving.join()  # rank 0 has done with it
        self._saving = threading.Thread(target=asyncio.run, args=(self._save(snapshot),), name="checkpoint", daemon=True)
        self._saving.start()

    def read(self, name: str, description: Description) -> None:
        """Fill this rank's shards. What cannot be read is raised on rank 0, too, and rank 0 decides."""
        async def read() -> Snapshot:
            async with self._store() as store:
                return await self._checkpoints(store).filled(name, description, self._learner.allocate(), self._group)

        try:
            self._read = asyncio.run(read())
        except SlipstreamError as error:
            self._read = None
            log.warning(f"checkpoint {name} could not be read: {error.message}", checkpoint=name)

    def load(self, _: None) -> None:
        """Put in force what was read."""
        assert self._read is not None, "nothing was read"
        self._learner.load(self._read)
        self._read = None

    def close(self) -> bool:
        """Whether the last checkpoint has ended."""
        if self._saving is not None:
            self._saving.join(END_S)
        return self._saving is None or not self._saving.is_alive()

    async def _save(self, snapshot: Snapshot) -> None:
        async with self._store() as store:
            while True:
                try:
                    await self._checkpoints(store).save(snapshot, step=0, incarnation=0, ledger_sequence=0)
                    return
                except Fenced:
                    return  # rank 0 ends
                except (SlipstreamError, concurrent.futures.CancelledError) as error:  # or rank 0 has run out of time
                    log.warning(f"the checkpoint is written again: {error}")

    def _store(self) -> Any:
        objects = self._run.objects
        return open_store(self._run.objects_url, objects.endpoint, objects.region)

    def _checkpoints(self, store: ObjectStore) -> Checkpoints:
        return Checkpoints(store, self._run.run.name, self._run.trainer.keep_checkpoints, self._group)


def in_place(modules: Mapping[str, torch.nn.Module], rank: int) -> Allocate:
    """Weights go where the models (by part) have them, moments into memory that the optimizer takes over: nothing twice."""
    layouts = {f"{part}/{name}": tensor for part, module in modules.items() for name, tensor in named(module).items()}
    optimized = {"optimizer": "weights", "critic_optimizer": "critic"}

    def allocate(part: str, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
        if part == "random" and not name.startswith(f"{rank}/"):
            return None
        moment = part in optimized
        like = layouts.get(f"{optimized[part]}/{name.rpartition('/')[0]}" if moment else f"{part}/{name}")
        if like is None or like.shape != shape:
            return torch.empty(shape, dtype=dtype)  # a step count; or of another model: `restore` says so
        return mesh.empty_like(like, dtype=dtype) if moment or like.dtype != dtype else like

    return allocate
