"""Which versions stay: the living, those that a living one is a patch of, and nothing else, through trainers' deaths."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.chain import Chain
from slipstream.manifest import Held, RawTensor, delete_version, read_manifest, read_tensors, write_version
from slipstream.objects import FileStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import run_file
from tests.unit.test_trainer_loop import train
from tests.unit.test_version_patches import _weights

FULL_EVERY, KEEP = 4, 2


class Trainer:
    """Publishes as services.trainer.publish does, with a ledger that gives up all but the newest KEEP, and those held."""

    def __init__(self, store: FileStore, living: list[PolicyVersion], incarnation: int) -> None:
        self.store, self.ledger, self.incarnation = store, living, incarnation
        self.chain = Chain(store, "demo", FULL_EVERY, list(living))
        self.held: set[int] = set()

    async def publish(self, number: int, announce: bool = True, orphans: bool = False) -> PolicyVersion:
        tensors = _weights(number)
        version = await write_version(
            self.store, run="demo", number=number, step=number, incarnation=self.incarnation, tensors=tensors, files={},
            parent=self.chain.parent)
        if not announce:
            return version
        self.ledger.append(version)
        given_up = [v for v in self.ledger[:-KEEP] if v.number not in self.held]
        self.ledger[:] = [v for v in self.ledger if v not in given_up]
        if orphans:
            await self.chain.give_up_orphans(number)
        for old in await self.chain.published(version, await read_manifest(self.store, version), tensors, given_up):
            await delete_version(self.store, old)
        return version


async def numbers(store: FileStore) -> list[int]:
    return sorted({int(key.split("/")[1].split("-")[0]) for key in await store.list("versions/0")})


async def readable(store: FileStore, version: PolicyVersion) -> bool:
    tensors = await read_tensors(store, await read_manifest(store, version, "demo"))
    return {t.name: bytes(t.data) for t in tensors} == {t.name: bytes(t.data) for t in _weights(version.step)}


async def test_ancestors_of_a_living_version_stay_and_go_with_it(tmp_path: Path) -> None:
    """1 2 3 4 | 5 6 7 8 | 9: a chain of four, of which the ledger needs the newest two, or one that is held. Late joiners read
    any living version at any time."""
    store = FileStore(tmp_path)
    trainer = Trainer(store, [], 1)
    for number in range(1, 4):
        await trainer.publish(number)
        assert all([await readable(store, v) for v in trainer.ledger])
    assert await numbers(store) == [1, 2, 3]  # 1 is given up, and 2 a patch of it
    await trainer.publish(4)
    await trainer.publish(5)
    assert await numbers(store) == [1, 2, 3, 4, 5]
    await trainer.publish(6)
    assert await numbers(store) == [5, 6]
    trainer.held = {6}
    for number in (7, 8, 9, 10):
        await trainer.publish(number)
    assert await numbers(store) == [5, 6, 9, 10] and all([await readable(store, v) for v in trainer.ledger])
    trainer.held = set()
    await trainer.publish(11)
    assert await numbers(store) == [9, 10, 11]


async def test_what_a_dead_trainer_left_is_collected(tmp_path: Path) -> None:
    """It had kept 5 and 6 for 7 and 8, which live; it had written 9 and not announced it, and half of 10. Its successor keeps
    5 to 8 while 7 or 8 is living, and drops them afterwards, and 9 and 10 at once."""
    store = FileStore(tmp_path)
    first = Trainer(store, [], 1)
    for number in range(1, 9):
        await first.publish(number)
    await first.publish(9, announce=False)
    await store.put("versions/00000010-1/model.safetensors", b"half")
    await store.put("versions/notes.txt", b"a person's")  # is nobody's version, and stays
    assert await numbers(store) == [5, 6, 7, 8, 9, 10]
    second = Trainer(store, first.ledger, 2)
    await second.publish(11, orphans=True)
    assert await numbers(store) == [5, 6, 7, 8, 11] and all([await readable(store, v) for v in second.ledger])
    await second.publish(12)
    assert await numbers(store) == [11, 12] and await store.get("versions/notes.txt")
    assert all([await readable(store, v) for v in second.ledger])


async def test_a_ledger_without_memory_loses_no_version_that_is_newer(tmp_path: Path) -> None:
    """A rebuilt ledger lists nothing: what is older than the first publication goes, what another writes meanwhile stays."""
    store = FileStore(tmp_path)
    first = Trainer(store, [], 1)
    for number in (1, 2):
        await first.publish(number)
    other = await write_version(
        store, run="demo", number=9, step=9, incarnation=3, tensors=[RawTensor("norm", "F32", (1,), bytes(4))], files={})
    second = Trainer(store, [], 2)
    await second.publish(3, orphans=True)
    assert await numbers(store) == [3, other.number]


async def test_held_is_what_the_next_version_is_a_patch_of(tmp_path: Path) -> None:
    """The chain hands out its parent until it is full_every long."""
    trainer = Trainer(FileStore(tmp_path), [], 1)
    parents: list[Held | None] = []
    for number in range(1, 7):
        parents.append(trainer.chain.parent)
        await trainer.publish(number)
    assert [p and p.version.number for p in parents] == [None, 1, 2, 3, None, 5]


@pytest.mark.parametrize("after_s, stays", [(0.0, False), (600.0, True)])
async def test_a_trainer_looks_for_them_once_nobody_can_hold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float, stays: bool
) -> None:
    """Not right after its start: somebody may still read a version that is void by now and in no list."""
    monkeypatch.setattr("services.trainer.publish.ORPHANS_S", after_s)
    store = FileStore(tmp_path / "objects")
    await store.put("versions/00000003-7/model.safetensors", b"half")
    buffer = FakeBuffer(steps=1)
    buffer.number = 5
    assert await train(buffer, run_file(str(tmp_path), run={"steps": 1})) == 0
    assert await numbers(store) == ([3, 6, 7] if stays else [6, 7])
