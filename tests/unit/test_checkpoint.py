"""Checkpoints: a crash between any two writes leaves the last complete one in force; a damaged one is stepped over."""

from __future__ import annotations

import json

import numpy as np
import pytest

from services.trainer.checkpoint import FOLDER, POINTER, Checkpoints
from services.trainer.learner import Snapshot
from slipstream.errors import Conflict, Fenced, InvalidInput, NotFound
from slipstream.manifest import RawTensor
from slipstream.objects import FileStore


class Crash(Exception):
    """What a killed process would not survive."""


class CrashingStore(FileStore):
    """A file store whose n-th write never happens; neither does any later one."""

    def __init__(self, root, writes: int) -> None:
        super().__init__(root)
        self.left = writes

    def _spend(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    async def put(self, key, data, durable=True):
        self._spend()
        await super().put(key, data, durable)

    async def put_if_absent(self, key, data):
        self._spend()
        return await super().put_if_absent(key, data)

    async def replace(self, key, data, tag):
        self._spend()
        return await super().replace(key, data, tag)

    async def delete(self, key):
        self._spend()
        await super().delete(key)


def snapshot(value: int) -> Snapshot:
    def tensor(name: str) -> RawTensor:
        return RawTensor(name, "F32", (2, 3), np.full((2, 3), value, np.float32).data.cast("B"))
    return Snapshot([tensor("w"), tensor("v")], [tensor("w/exp_avg")], [RawTensor("torch", "U8", (4,), bytes([value] * 4))])


async def opened(store, incarnation: int = 1, keep: int = 2) -> Checkpoints:
    """A trainer start up to its take-over."""
    checkpoints = Checkpoints(store, "test", keep)
    await checkpoints.open()
    await checkpoints.take_over(incarnation)
    return checkpoints


async def saved(checkpoints: Checkpoints, step: int, incarnation: int = 1) -> str:
    header = await checkpoints.save(snapshot(step), step=step, incarnation=incarnation, ledger_sequence=10 * step)
    return header.name


async def resumed(root) -> tuple[int, int]:
    """(step, value of the weights) that a fresh start would get."""
    checkpoints = Checkpoints(FileStore(root), "test", 2)
    await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None
    header, contents = loaded
    return header.step, int(np.frombuffer(contents.weights[0].data, np.float32)[0])


async def test_round_trip(tmp_path):
    """Everything comes back: tensors, step, ledger sequence, notes."""
    checkpoints = await opened(FileStore(tmp_path), incarnation=3)
    assert await checkpoints.load() is None
    await checkpoints.save(snapshot(7), step=7, incarnation=3, ledger_sequence=70, ledger_epoch=2, notes={"rewards": [0.5]})
    again = Checkpoints(FileStore(tmp_path), "test", 2)
    pointer = await again.open()
    assert (pointer.step, pointer.incarnation, pointer.ledger_sequence) == (7, 3, 70)
    header, contents = await again.load()
    assert (header.step, header.incarnation, header.ledger_epoch, header.notes) == (7, 3, 2, {"rewards": [0.5]})
    for name in ("weights", "optimizer", "random"):
        expected, found = (
            {t.name: (t.dtype, t.shape, bytes(t.data)) for t in getattr(s, name)} for s in (snapshot(7), contents))
        assert found == expected


@pytest.mark.parametrize("writes", range(5))
async def test_a_crash_before_any_write_leaves_the_former_one(tmp_path, writes):
    """Three shards, the manifest, the pointer: killed before the n-th, the next start resumes from step 2, not from step 4."""
    await saved(await opened(FileStore(tmp_path)), 2)
    crashing = Checkpoints(CrashingStore(tmp_path, writes + 1), "test", 2)
    await crashing.open()
    await crashing.take_over(2)
    with pytest.raises(Crash):
        await saved(crashing, 4, incarnation=2)
    assert await resumed(tmp_path) == (2, 2)


async def test_a_crash_after_the_last_write_keeps_the_new_one(tmp_path):
    """Once the pointer is replaced, the checkpoint is in force, whatever happens to the clean-up."""
    await saved(await opened(FileStore(tmp_path)), 2)
    for writes in range(4):
        crashing = Checkpoints(CrashingStore(tmp_path, 6 + writes), "test", 1)
        await crashing.open()
        await crashing.take_over(2 + writes)
        await saved(crashing, 4 + writes, incarnation=2 + writes)
        with pytest.raises(Crash):
            await crashing.retain()
        assert await resumed(tmp_path) == (4 + writes, 4 + writes)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
async def test_a_damaged_checkpoint_is_stepped_over(tmp_path, damage):
    """A flipped bit, a short file, a missing shard or a broken manifest: the next older complete one is used, and named."""
    checkpoints = await opened(FileStore(tmp_path))
    await saved(checkpoints, 2)
    name = await saved(checkpoints, 4)
    path = tmp_path / name / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage in ("truncate", "manifest") else data)
    if damage == "remove":
        path.unlink()
    assert await resumed(tmp_path) == (2, 2)
    for leftover in (tmp_path / FOLDER).rglob("weights.safetensors"):
        leftover.write_bytes(b"")
    with pytest.raises(InvalidInput, match="none of 2 checkpoints is whole"):
        await resumed(tmp_path)


async def test_what_is_not_written_well_is_never_put_in_force(tmp_path):
    """The store lies about a write: reading back notices, and the pointer stays."""

    class Lossy(FileStore):
        async def put(self, key, data, durable=True):
            await super().put(key, b"".join([data] if isinstance(data, bytes) else data)[:-1], durable)

    await saved(await opened(FileStore(tmp_path)), 2)
    with pytest.raises(InvalidInput, match="damaged"):
        await saved(await opened(Lossy(tmp_path), 2), 4, 2)
    assert await resumed(tmp_path) == (2, 2)


async def test_a_slower_predecessor_is_fenced(tmp_path):
    """Trainer 1 is still alive when trainer 2 takes over: its checkpoint is not put in force, and it is told to stop."""
    first = await opened(FileStore(tmp_path), 1)
    await saved(first, 2)
    second = await opened(FileStore(tmp_path), 2)
    with pytest.raises(Fenced, match="trainer incarnation 2 has taken over from 1"):
        await saved(first, 10)
    await saved(second, 4, 2)
    assert await resumed(tmp_path) == (4, 4)
    with pytest.raises(Fenced):
        await opened(FileStore(tmp_path), 2)
    (tmp_path / (await second.load())[0].name / "weights.safetensors").unlink()
    assert await resumed(tmp_path) == (2, 2), "step 10 of the fenced branch is not a candidate"


async def test_a_pointer_that_moved_is_a_conflict(tmp_path):
    """Two starts read the same pointer: the second to write starts over."""
    late = Checkpoints(FileStore(tmp_path), "test", 2)
    await late.open()
    await opened(FileStore(tmp_path), 1)
    with pytest.raises(Conflict):
        await late.take_over(2)
    await late.open()
    await late.take_over(2)


async def test_only_the_newest_are_kept(tmp_path):
    """keep = 2, and half-written ones below go as well; the pointer's is never touched."""
    store = FileStore(tmp_path)
    checkpoints = await opened(store)
    names = [await saved(checkpoints, step) for step in (2, 4, 6)]
    await store.put(f"{FOLDER}00000003-1-half/weights.safetensors", b"x")
    assert await checkpoints.retain() == sorted([names[0], f"{FOLDER}00000003-1-half"])
    assert {k.rsplit("/", 1)[0] for k in await store.list(FOLDER) if k != POINTER} == set(names[1:])
    with pytest.raises(NotFound):
        await store.get(f"{names[0]}/manifest.json")


async def test_another_runs_pointer_is_refused(tmp_path):
    """Two runs never share a store by accident."""
    await opened(FileStore(tmp_path))
    with pytest.raises(InvalidInput, match="belongs to run 'test', not 'other'"):
        await Checkpoints(FileStore(tmp_path), "other", 2).open()
    (tmp_path / POINTER).write_text(json.dumps([1]))
    with pytest.raises(InvalidInput, match="damaged"):
        await Checkpoints(FileStore(tmp_path), "test", 2).open()
