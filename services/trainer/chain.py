"""Chains of patches: what the next policy version is a patch of, and which versions have to outlive their own deletion.

    complete ◄── patch ◄── patch ◄── ... (trainer.full_every versions in all)      complete ◄── patch ...

A version that the ledger gives up is deleted once no living version of its chain comes after it: whoever joins late reads the
chain from its start. Memory: the weights of the last version, where patches are made at all (16-bit weights). What a trainer
that died had kept for others, or had written and not announced, is found in the store and given up like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import NotFound
from slipstream.manifest import Held, Manifest, RawTensor, read_manifest, stored_versions
from slipstream.objects import ObjectStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

PATCHED = ("BF16", "F16")  # a small step moves few elements of these; of float32 it moves nearly all


class Chain:
    """The versions of one trainer, and those that it found. `living` are those found; call `published` after each."""

    def __init__(self, store: ObjectStore, run: str, full_every: int, living: Sequence[PolicyVersion] = ()) -> None:
        self._store, self._run, self._full_every = store, run, full_every
        self._living = {v.number: v for v in living}
        self._given_up: dict[int, PolicyVersion] = {}
        self._full: dict[int, int] = {}
        self._held: Held | None = None
        self._length = 0

    @property
    def parent(self) -> Held | None:
        """What the next version is written against; None when it is to be complete."""
        return self._held if self._length < self._full_every else None

    async def published(
            self, version: PolicyVersion, manifest: Manifest, tensors: Sequence[RawTensor], given_up: Sequence[PolicyVersion],
    ) -> list[PolicyVersion]:
        """Note a version that was published, and those that the ledger gives up. Returns those to delete now."""
        self._length = self._length + 1 if manifest.parent else 1
        if self._full_every > 1 and any(t.dtype in PATCHED for t in tensors):
            self._held = Held(version, tensors, manifest.full)
        self._living[version.number], self._full[version.number] = version, manifest.full
        for old in given_up:
            self._living.pop(old.number, None)
            self._given_up[old.number] = old
        needed: dict[int, int] = {}  # chain -> its last living version
        for living in self._living.values():
            full = await self._chain_of(living)
            needed[full] = max(needed.get(full, 0), living.number)
        gone = [v for v in self._given_up.values() if v.number > needed.get(await self._chain_of(v), 0)]
        for old in gone:
            del self._given_up[old.number]
        return gone

    async def give_up_orphans(self, before: int) -> None:
        """Give up versions in the store, with numbers below `before`, that neither the ledger nor this trainer has named.

        Not right after a start: the ledger lists no version that is void, although somebody may still hold it.
        """
        for version, full in await stored_versions(self._store):
            if version.number < before and not {version.number} & (self._living.keys() | self._given_up.keys()):
                self._given_up[version.number], self._full[version.number] = version, full

    async def _chain_of(self, version: PolicyVersion) -> int:
        if version.number not in self._full:
            try:
                self._full[version.number] = (await read_manifest(self._store, version, self._run)).full
            except NotFound:  # deleted before
                self._full[version.number] = version.number
        return self._full[version.number]
