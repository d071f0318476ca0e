"""After the walk: the batch log is the truth. A run that was disturbed is trained again from it, version by version; a fork
goes on from any of its steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.trainer.checkpoint import Checkpoints
from services.trainer.fork import fork
from services.trainer.learner import Learner
from services.trainer.records import Records
from services.trainer.replay import Replay, Report, published, replay
from slipstream import batch_log
from slipstream.config import RunFile, parse
from slipstream.errors import ConfigError, NotFound, SlipstreamError
from slipstream.manifest import delete_version, read_manifest, weights_hash
from slipstream.objects import FileStore
from slipstream.sample import crc32c
from tests.buffer_client import buffer
from tests.redis_server import RedisProcess
from tests.walk.hops import Walk, commit, fetch, read_batch, up_to_batch, write


class Disturbed:
    """Three steps by two trainers: the first trains 1 and 2, publishes both, and dies with checkpoint 0 alone; the second
    trains 1 and 2 again, checkpoints 2, and trains 3. Versions: of step 1 and 2 two each, of step 3 one."""

    def __init__(self, walk: Walk, folder: Path) -> None:
        data = walk.run.model_dump(mode="json")
        data["run"] |= {"folder": str(folder)}
        self.run, self.walk, self.folder, self.store = parse(data), walk, folder, FileStore(folder / "objects")
        self.records = Records(folder)

    async def play(self) -> Disturbed:
        walk, checkpoints = self.walk, await self.opened()
        await checkpoints.save(walk.learner.snapshot(), step=0, incarnation=1, ledger_sequence=0)
        for k in (1, 2):
            await self.step(k, again=False)
        walk.learner = Learner(self.run)
        checkpoints = Checkpoints(self.store, self.run.run.name, keep=1)
        pointer = await checkpoints.open()
        loaded = await checkpoints.load()
        assert loaded is not None and loaded[0].step == 0
        walk.learner.load(loaded[1])
        await walk.buffer.take_incarnation(above=pointer.incarnation)
        await checkpoints.take_over(walk.buffer.incarnation)
        for k in (1, 2, 3):
            batch = await self.step(k, again=k < 3)
            if k == 2:
                await commit(walk, checkpoints, batch)
                await checkpoints.retain()
        return self

    async def opened(self) -> Checkpoints:
        checkpoints = Checkpoints(self.store, self.run.run.name, keep=1)
        await checkpoints.open()
        await checkpoints.take_over(self.walk.buffer.incarnation)
        return checkpoints

    async def step(self, k: int, again: bool):
        """Train batch k, publish it, and forget the version at once: its hash stays."""
        walk = self.walk
        batch = await (read_batch if again else up_to_batch)(walk, k)
        self.records.audit(k, walk.buffer.incarnation, batch.audit)
        metrics = walk.learner.step(batch.groups, k)
        self.records.metrics({"step": k, "reward_mean": metrics["reward_mean"]})
        version = await write(walk, await walk.buffer.reserve(k), k)
        self.records.version(version, weights_hash((await read_manifest(self.store, version)).tensors))
        await walk.buffer.announce(version)
        await walk.engine.swap(version, await fetch(walk, version))
        await delete_version(self.store, version)
        return batch

    async def again(self, to: int = 3) -> Report:
        return await replay(Replay(self.run, self.store), await published(self.folder, self.store), to, lambda text: None)


@pytest.fixture
async def disturbed(walk: Walk, tmp_path: Path) -> Disturbed:
    return await Disturbed(walk, tmp_path).play()


def contents(folder: Path) -> dict[str, str]:
    """Every file's hash, Redis' own left out."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*")
            if p.is_file() and p.relative_to(folder).parts[0] in ("objects", "audit", "metrics.jsonl")}


def lines(folder: Path, name: str) -> Sequence[dict[str, int]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


async def test_every_version_is_reproduced(disturbed: Disturbed) -> None:
    """No version is left, checkpoint 0 and the log are enough: all five hashes come out again, those that two trainers
    published for one step included. `--to` stops earlier."""
    assert not [k for k in await disturbed.store.list("versions/") if "manifest" in k and "00000001-" not in k]
    checkpoints = Checkpoints(disturbed.store, "test", keep=1)
    await checkpoints.open()
    assert await checkpoints.steps() == [0, 2], "the first is kept for ever"
    report = await disturbed.again()
    assert report.sentence == "replayed 3 batches, 5 versions equal"
    assert (await disturbed.again(to=2)).sentence == "replayed 2 batches, 4 versions equal"
    with pytest.raises(NotFound, match="batch 4 is not in the batch log: it reaches to 3"):
        await disturbed.again(to=4)


async def test_the_first_version_that_differs_is_named(disturbed: Disturbed) -> None:
    """Two rewards of a group of batch 2 change places in the log, checksums and all: batch 1 is equal, version 3 of step 2 is
    not. A line of versions.jsonl that lies is found at its step, and a damaged body at its byte."""
    log = disturbed.folder / "objects" / batch_log.log_key(2)
    data = log.read_bytes()
    batch = await batch_log.read_header(disturbed.store, 2)
    group = next(g for g in batch.groups if len({m.score.scalar for m in g.members}) > 1)
    scores = [m.score.scalar for m in group.members]
    for member, scalar in zip(group.members, scores[1:] + scores[:1], strict=True):
        member.score.scalar = scalar
    header = batch.SerializeToString(deterministic=True)
    magic, size, _, zero = batch_log.HEAD.unpack(data[:batch_log.HEAD.size])
    body = data[batch_log.HEAD.size + size:].removeprefix(bytes(max(0, len(header) - size)))
    head = batch_log.HEAD.pack(magic, len(header), crc32c(header), zero) + header + bytes(max(0, size - len(header)))
    log.write_bytes(head + body)
    report = await disturbed.again()
    assert (report.batches, report.equal) == (2, 2)
    assert report.difference.startswith("version 3 of step 2 (incarnation 1) differs: published ")

    log.write_bytes(data)
    path = disturbed.folder / "audit" / "versions.jsonl"
    rows = lines(disturbed.folder, "audit/versions.jsonl")
    path.write_text("".join(json.dumps(r | ({"weights": "0" * 64} if r["version"] == 4 else {})) + "\n" for r in rows))
    report = await disturbed.again()
    assert (report.batches, report.equal) == (1, 1) and "version 4 of step 1 (incarnation 2)" in report.difference

    log.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    path.write_text("")
    with pytest.raises(SlipstreamError, match=r"batches/00000002.bin is damaged at byte \d+"):
        await disturbed.again()


def forked(origin: RunFile, folder: Path, **sections: object) -> RunFile:
    """The run file of a fork in `folder`, with its folder made."""
    data = origin.model_dump(mode="json")
    data["run"] |= {"name": "branch", "folder": str(folder)}
    for name, values in sections.items():
        data[name] = {**data[name], **values} if isinstance(values, dict) else values
    folder.mkdir(exist_ok=True)
    return parse(data)


async def test_a_fork_goes_on_with_its_own_ledger(disturbed: Disturbed, redis: RedisProcess, tmp_path: Path) -> None:
    """After step 1, which no checkpoint holds: replayed, compared with what was published, saved as the fork's first. A buffer
    with an empty ledger goes on behind the draws of batch 1 and numbers batch 2 anew; the origin has not changed by a byte."""
    before = contents(disturbed.folder)
    new = forked(disturbed.run, tmp_path / "branch", trainer={"learning_rate": 5e-3})
    provenance = await fork(disturbed.run, new, 1)
    assert contents(disturbed.folder) == before
    expected = {r["weights"] for r in lines(disturbed.folder, "audit/versions.jsonl") if r["step"] == 1}
    assert {provenance["weights"]} == expected and provenance["replayed_from"] == 0
    assert [row["step"] for row in lines(new.folder, "metrics.jsonl")][-1] == 1
    assert {row["batch"] for row in lines(new.folder, "audit/trainer.jsonl")} == {1}

    store = FileStore(new.folder / "objects")
    checkpoints = Checkpoints(store, "branch", keep=1)
    pointer = await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None and loaded[0].step == 1 and pointer.incarnation == 2
    async with buffer(redis, new.folder / "objects", new, tasks=0) as client:
        taken = await client.take_incarnation(above=pointer.incarnation, checkpoint_batch=1)
        assert (taken.incarnation, taken.numbered_batch, taken.committed_batch) == (3, 1, 1)
        await client.publish(1)
        draws = {lease.lease.sample.draw.number for lease in (await client.lease()).leases}
        assert len(draws) == 8 and min(draws) >= 4, "batch 1 took draws 0 to 3"
        assert client.front is not None
        (await client.front.ledger.balance()).check(group_size=4)


async def test_a_fork_needs_a_place_of_its_own_and_weights_that_were_published(disturbed: Disturbed, tmp_path: Path) -> None:
    """The origin's name or objects are refused; so is a step that replays to other weights than were published, and one that
    was not trained."""
    with pytest.raises(ConfigError, match="run.name = 'test' is the origin's"):
        await fork(disturbed.run, disturbed.run, 1)
    same = forked(disturbed.run, tmp_path / "a", objects={"url": disturbed.run.objects_url})
    with pytest.raises(ConfigError, match="is the origin's: a fork needs a place of its own"):
        await fork(disturbed.run, same, 1)
    with pytest.raises(NotFound, match="the newest step that was trained is 3"):
        await fork(disturbed.run, forked(disturbed.run, tmp_path / "b"), 4)
    rows = lines(disturbed.folder, "audit/versions.jsonl")
    (disturbed.folder / "audit" / "versions.jsonl").write_text(
        "".join(json.dumps(r | {"weights": "0" * 64}) + "\n" for r in rows))
    with pytest.raises(SlipstreamError, match="step 3, replayed from checkpoint 2, is not what version 6 published"):
        await fork(disturbed.run, forked(disturbed.run, tmp_path / "c"), 3)


async def test_a_pinned_fork_has_the_versions_that_its_draws_name(disturbed: Disturbed, tmp_path: Path) -> None:
    """Pinned with max_lag 1, forked after step 2: the draws of batch 3 are generated by step 1, whose version the fork brings
    along, with the weights that the origin published."""
    new = forked(disturbed.run, tmp_path / "branch", schedule={"mode": "pinned"})
    await fork(disturbed.run, new, 2)
    versions = await published(new.folder, FileStore(new.folder / "objects"))
    expected = {r["weights"] for r in lines(disturbed.folder, "audit/versions.jsonl") if r["step"] == 1}
    assert {step: {v.weights for v in found} for step, found in versions.items()} == {1: expected}
