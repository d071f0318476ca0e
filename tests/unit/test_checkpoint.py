"""Checkpoints: a crash between any two writes leaves the last complete one in force; a damaged one is stepped over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil

import pytest
import torch

from services.trainer.checkpoint import FOLDER, FORMAT, POINTER, Checkpoints, sealed, unsealed
from services.trainer.snapshot import PARTS, Snapshot
from slipstream.errors import Conflict, Fenced, InvalidInput, NotFound
from slipstream.objects import FileStore


class Crash(Exception):
    """What a killed process would not survive."""


class Dying:
    """A store whose operation number `at` is the last: it dies before the operation has an effect, or after it."""

    def __init__(self, store: FileStore, at: int = -1, when: str = "before") -> None:
        self._store, self._at, self._when, self.done, self.url = store, at, when, [], store.url

    def __getattr__(self, name: str):
        if not hasattr(self._store, name):
            raise AttributeError(name)

        async def operation(*arguments):
            if self._at in range(len(self.done) + (self._when == "before")):
                raise Crash
            result = await getattr(self._store, name)(*arguments)
            self.done.append((name, arguments[0]))
            if self._at == len(self.done) - 1:
                raise Crash
            return result
        return operation


def snapshot(value: int) -> Snapshot:
    tensor = torch.full((2, 3), float(value))
    return Snapshot(
        {"w": tensor, "v": tensor.bfloat16() + 1}, {"w/exp_avg": tensor + 2, "w/step": torch.tensor(float(value))},
        {"0/torch": torch.tensor([value] * 4, dtype=torch.uint8)})


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
    return header.step, int(contents.weights["w"][0, 0])


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
    for part in PARTS:
        expected, found = getattr(snapshot(7), part), getattr(contents, part)
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])


async def turn(store, step: int, incarnation: int) -> None:
    """One trainer start, from its take-over to the clean-up after its first checkpoint."""
    checkpoints = Checkpoints(store, "test", 1)
    await checkpoints.open()
    assert await checkpoints.load() is not None
    await checkpoints.take_over(incarnation)
    await saved(checkpoints, step, incarnation)
    await checkpoints.retain()


async def test_a_crash_at_any_operation_leaves_the_former_or_the_new_one(tmp_path, monkeypatch):
    """Every operation of a start, a checkpoint and its clean-up, killed before and after its effect: a fresh start finds a
    whole checkpoint, the new one exactly from the pointer's replacement on, and goes on from there. Nothing piles up."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # processes die here, not machines
    former = await opened(FileStore(tmp_path / "former"))
    for step in (0, 1, 2):
        await saved(former, step)
    shutil.copytree(tmp_path / "former", tmp_path / "undisturbed")
    undisturbed = Dying(FileStore(tmp_path / "undisturbed"))
    await turn(undisturbed, 4, 2)
    operations = undisturbed.done
    assert [name for name, key in operations if key == POINTER] == ["get_tagged", "replace", "replace"]
    assert len(operations) > 20
    in_force = max(n for n, (name, key) in enumerate(operations) if (name, key) == ("replace", POINTER))
    for at in range(len(operations)):
        for when in ("before", "after"):
            root = tmp_path / f"{at}-{when}"
            shutil.copytree(tmp_path / "former", root)
            with pytest.raises(Crash):
                await turn(Dying(FileStore(root), at, when), 4, 2)
            expected = 4 if at > in_force or (at == in_force and when == "after") else 2
            assert await resumed(root) == (expected, expected), (operations[at], when)
            older = Checkpoints(FileStore(root), "test", 1)
            await older.open()
            for step in await older.steps():
                assert (await older.load_at(step))[0].step == step, "what looks complete is"
            await turn(FileStore(root), 6, 3)
            assert await resumed(root) == (6, 6)
            folders = {key.split("/")[1].split("-")[0] for key in await FileStore(root).list(FOLDER) if key != POINTER}
            assert folders == {"00000000", "00000006"}, (operations[at], when)


class InTurn(FileStore):
    """A store as one of several starts sees it: they replace the pointer in a given order, such as "ABBA", which is noted."""

    def __init__(self, root, who: str, order: list[str], moved: asyncio.Condition, written: list[tuple[str, int, int]]) -> None:
        super().__init__(root)
        self._who, self._order, self._moved, self._written = who, order, moved, written

    async def replace(self, key, data, tag):
        async with self._moved:
            await self._moved.wait_for(lambda: self._order[:1] in ([], [self._who]))
            try:
                new = await super().replace(key, data, tag)
                pointer = json.loads(data)
                self._written.append((self._who, pointer["incarnation"], pointer["step"]))
                return new
            finally:
                del self._order[:1]
                self._moved.notify_all()

    async def leave(self) -> None:
        """The others need not wait for this one any more."""
        async with self._moved:
            self._order[:] = [who for who in self._order if who != self._who]
            self._moved.notify_all()


async def test_of_two_racing_trainers_the_loser_learns_it(tmp_path):
    """Two starts at once, in every order of their writes to the pointer: one takes over first; the other notices, reads again
    and fences it, unless it has saved by then. Whoever could not save was told; in force is the checkpoint of the newer."""
    outcomes = set()
    for order in sorted({"".join(p) for p in itertools.permutations("AAABBB")}):
        root, turns, moved, both = tmp_path / order, list(order), asyncio.Condition(), asyncio.Barrier(2)
        written: list[tuple[str, int, int]] = []
        await saved(await opened(FileStore(root), 1), 2)

        async def start(store: InTurn, both: asyncio.Barrier) -> int:
            checkpoints = Checkpoints(store, "test", 2)
            try:
                incarnation = (await checkpoints.open()).incarnation + 1
                await both.wait()
                while True:
                    try:
                        await checkpoints.take_over(incarnation)
                        break
                    except Conflict:
                        incarnation = (await checkpoints.open()).incarnation + 1
                await saved(checkpoints, 10 * incarnation, incarnation)
                return incarnation
            finally:
                await store.leave()

        ended = await asyncio.gather(
            *(start(InTurn(root, who, turns, moved, written), both) for who in "AB"), return_exceptions=True)
        assert all(isinstance(end, int | Fenced) for end in ended) and 3 in ended
        assert [incarnation for _, incarnation, _ in written] in ([2, 2, 3, 3], [2, 3, 3])
        assert [step for _, _, step in written] == ([2, 20, 20, 30] if 2 in ended else [2, 2, 30])
        assert await resumed(root) == (30, 30)
        outcomes.add(2 in ended)
    assert outcomes == {True, False}, "the first to take over was fenced in some orders, and had saved before in others"


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
async def test_a_damaged_checkpoint_is_stepped_over(tmp_path, damage):
    """A flipped bit, a short file, a missing shard or a broken manifest: the next older complete one is used, and named."""
    checkpoints = await opened(FileStore(tmp_path))
    await saved(checkpoints, 2)
    name = await saved(checkpoints, 4)
    path = tmp_path / name / ("manifest.json" if damage == "manifest" else "optimizer-00000.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    path.write_bytes(data[: len(data) // 2] if damage in ("truncate", "manifest") else data)
    if damage == "remove":
        path.unlink()
    assert await resumed(tmp_path) == (2, 2)
    for leftover in (tmp_path / FOLDER).rglob("weights-00000.safetensors"):
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
    (tmp_path / (await second.load())[0].name / "weights-00000.safetensors").unlink()
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


async def test_the_first_and_the_newest_are_kept(tmp_path):
    """keep = 2, and the first for ever, because replay starts there; half-written ones below the newest go as well."""
    store = FileStore(tmp_path)
    checkpoints = await opened(store)
    names = [await saved(checkpoints, step) for step in (0, 2, 4, 6)]
    half = f"{FOLDER}00000003-1-half"
    await store.put(f"{half}/weights-00000.safetensors", b"x")
    await store.put(f"{FOLDER}00000007-1-half/weights-00000.safetensors", b"somebody may be writing it")
    assert await checkpoints.retain() == [names[1], half]
    assert await checkpoints.steps() == [0, 4, 6]
    with pytest.raises(NotFound):
        await store.get(f"{names[1]}/manifest.json")
    assert await checkpoints.retain() == []


async def test_an_older_one_is_found_by_its_step(tmp_path):
    """Replay and fork start from the newest at or below a step; a damaged one is stepped over."""
    checkpoints = await opened(FileStore(tmp_path))
    names = [await saved(checkpoints, step) for step in (2, 4, 6)]
    assert [(await checkpoints.load_at(step))[0].step for step in (2, 3, 5, 99)] == [2, 2, 4, 6]
    (tmp_path / names[1] / "weights-00000.safetensors").unlink()
    assert (await checkpoints.load_at(5))[0].step == 2
    with pytest.raises(NotFound, match=r"no checkpoint at or below step 1; there are \[2, 4, 6\]"):
        await checkpoints.load_at(1)


async def test_another_runs_pointer_is_refused(tmp_path):
    """Two runs never share a store by accident."""
    await opened(FileStore(tmp_path))
    with pytest.raises(InvalidInput, match="belongs to run 'test', not 'other'"):
        await Checkpoints(FileStore(tmp_path), "other", 2).open()
    (tmp_path / POINTER).write_text(json.dumps([1]))
    with pytest.raises(InvalidInput, match="damaged"):
        await Checkpoints(FileStore(tmp_path), "test", 2).open()


async def test_a_checkpoint_of_another_format_is_named_and_not_stepped_over(tmp_path):
    """It is no damage: an older checkpoint in its place would be before the last commit. Fields of a later one do no harm."""
    checkpoints = await opened(FileStore(tmp_path))
    await saved(checkpoints, 1)
    name = await saved(checkpoints, 2)
    path = tmp_path / name / "manifest.json"
    fields = unsealed(str(path), path.read_bytes())
    path.write_bytes(sealed({**fields, "added_later": 1}))
    pointer = tmp_path / POINTER
    pointer.write_bytes(sealed({**unsealed(POINTER, pointer.read_bytes()), "added_later": 1}))
    assert await resumed(tmp_path) == (2, 2)
    for number, words in ((FORMAT + 1, "a newer release wrote it"), (FORMAT - 1, "an older release wrote it")):
        path.write_bytes(sealed({**fields, "format": number}))
        with pytest.raises(InvalidInput, match=words) as error:
            await resumed(tmp_path)
        assert error.value.reason == "FORMAT" and name in error.value.message
