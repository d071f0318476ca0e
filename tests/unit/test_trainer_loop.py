"""The trainer's loop against a buffer that only numbers batches: order of events, resume bit for bit, fencing, stops."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer import loop as loop_module
from services.trainer.loop import TrainerLoop
from services.trainer.records import Records
from services.trainer.service import TrainerServicer
from services.trainer.warmup import warm_up
from slipstream import config, rpc
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.manifest import read_manifest, read_tensors
from slipstream.model import build
from slipstream.objects import FileStore
from slipstream.protos.trainer.v1 import trainer_pb2
from slipstream.sample import crc32c, encode
from slipstream.service import open_context
from slipstream.service_command import ServiceArguments
from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import run_file


class Start:
    """One trainer start in this process; `await` its `code`."""

    def __init__(self, run: config.RunFile, address: str) -> None:
        self.lifecycle = Lifecycle(SystemClock(), stage_timeout_s=20)
        self.loop: TrainerLoop
        self.ready = asyncio.Event()
        self.code = asyncio.create_task(self._run(ServiceArguments(run, "trainer", "trainer-0", address)))

    async def _run(self, arguments: ServiceArguments) -> int:
        async with open_context(arguments, self.lifecycle, self.lifecycle.clock) as context:
            self.loop = TrainerLoop(context)
            self.ready.set()
            self.lifecycle.spawn("trainer loop", self.loop.run(), endless=False)
            return await self.lifecycle.run()


async def train(buffer: FakeBuffer, run: config.RunFile) -> int:
    """A start from beginning to end; its exit code."""
    async with rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        return await Start(run, server.address).code


async def versions(buffer: FakeBuffer, folder: Path) -> dict[int, dict[str, bytes]]:
    """Step → the weights of its last published version, read back as a rollout worker does."""
    store, found = FileStore(folder / "objects"), {}
    for _, step, version in buffer.kinds("publish"):
        tensors = await read_tensors(store, await read_manifest(store, version, "test"))
        found[step] = {t.name: bytes(t.data) for t in tensors}
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_run_from_start_to_end(tmp_path):
    """Incarnation, version 0, four batches in order, a version for each, commits at 2 and 4, model and records at the end."""
    buffer, run = FakeBuffer(), run_file(tmp_path)
    assert await train(buffer, run) == 0
    assert buffer.events[0] == ("incarnation", 1, 0)
    assert [e[1] for e in buffer.kinds("lease")] == [1, 2, 3, 4]
    assert [e[1] for e in buffer.kinds("publish")] == [0, 1, 2, 3, 4]
    assert [e[1] for e in buffer.kinds("commit")] == [2, 4]
    order = [e[:2] for e in buffer.events]
    assert order.index(("publish", 0)) < order.index(("commit", 2)) < order.index(("commit", 4))
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    names = ("reward_mean tokens lag_mean lag_max gap_mean gap_max loss grad_norm entropy clip_share step_s wait_s "
             "tokens_per_s groups_without_signal version time_unix incarnation")
    for name in names.split():
        assert all(isinstance(line[name], (int, float)) for line in found), name
    assert [line["lag_max"] for line in found] == [0, 1, 1, 1]
    audit = lines(tmp_path / "audit" / "trainer.jsonl")
    assert [entry["batch"] for entry in audit] == [1, 2, 3, 4]
    assert [s[:2] for s in audit[0]["samples"]] == [[d, i] for d in range(4) for i in range(4)]
    model, _ = build(config.Model(path=str(tmp_path / "model")), 0)
    last = (await versions(buffer, tmp_path))[4]
    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == last[name]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_stopped_and_resumed_is_bitwise_the_undisturbed_run(tmp_path, deterministic):
    """2 steps + stop + resume + 2 steps = 4 steps: weights and optimizer state, byte for byte."""
    schedule = {"deterministic": deterministic}
    whole, parts = FakeBuffer(), FakeBuffer()
    assert await train(whole, run_file(tmp_path / "whole", schedule=schedule)) == 0
    run = run_file(tmp_path / "parts", schedule=schedule, trainer={"checkpoint_every": 100})
    async with rpc.Server("127.0.0.1", 0, parts.registrations) as server:
        first = Start(run, server.address)
        parts.on_event = lambda e: first.lifecycle.request_stop("SIGTERM") if e[:2] == ("publish", 2) else None
        parts.gate = lambda batch: "held" if batch > 2 else ""
        assert await first.code == 0
        parts.gate = lambda batch: ""
        assert [e[1] for e in parts.kinds("commit")] == [2], "a stop leaves a checkpoint"
        assert not (tmp_path / "parts" / "model").exists()
        assert await Start(run, server.address).code == 0
    assert parts.kinds("incarnation") == [("incarnation", 1, 0), ("incarnation", 2, 2)]
    assert parts.checkpoints_told == [(0, 0), (3, 20)], "from it the buffer knows a ledger that was lost or rewound"
    assert [e[1] for e in parts.kinds("publish")] == [0, 1, 2, 2, 3, 4], "republished on resume"
    expected, found = await versions(whole, tmp_path / "whole"), await versions(parts, tmp_path / "parts")
    assert found == expected
    [one], [other] = (
        (tmp_path / n / "objects").glob("checkpoints/00000004-*/optimizer-00000.safetensors") for n in ("whole", "parts"))
    assert one.read_bytes() == other.read_bytes()


async def test_a_crash_repeats_what_no_checkpoint_covers(tmp_path):
    """Killed after batch 3 was applied and published but not committed: batch 3 is trained again, to the same weights."""
    whole, broken = FakeBuffer(), FakeBuffer()
    assert await train(whole, run_file(tmp_path / "whole")) == 0
    run = run_file(tmp_path / "broken")
    async with rpc.Server("127.0.0.1", 0, broken.registrations) as server:
        first = Start(run, server.address)

        def crash(event: tuple[Any, ...]) -> None:
            if event[:2] == ("publish", 3):
                broken.on_event, broken.gate = (lambda e: None), (lambda batch: "")
                first.loop.learner.step = None  # pyright: ignore
        broken.on_event, broken.gate = crash, lambda batch: "held" if batch == 4 else ""
        assert await first.code == 1
        assert await Start(run, server.address).code == 0
    assert broken.kinds("incarnation")[1][2] == 2
    assert await versions(broken, tmp_path / "broken") == await versions(whole, tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "broken" / "metrics.jsonl")] == [1, 2, 3, 4]
    audit = lines(tmp_path / "broken" / "audit" / "trainer.jsonl")
    third = [entry for entry in audit if entry["batch"] == 3]
    assert len(third) == 2 and third[0]["samples"] == third[1]["samples"]
    assert [entry["incarnation"] for entry in third] == [1, 2]


async def test_a_fenced_trainer_stops_with_an_error(tmp_path):
    """Another trainer takes a higher incarnation: this one's next call fails, and it exits non-zero, committing nothing."""
    buffer = FakeBuffer()

    def usurp(event: tuple[Any, ...]) -> None:
        if event[:2] == ("publish", 2):
            buffer.incarnation += 1
    buffer.on_event = usurp
    assert await train(buffer, run_file(tmp_path, trainer={"checkpoint_every": 100})) != 0
    assert not buffer.kinds("commit")


async def test_the_buffer_may_ask_for_a_checkpoint(tmp_path):
    """Batch 3 does not come before 2 is committed (no room): the trainer commits in the middle of its wait, and goes on."""
    buffer = FakeBuffer()
    buffer.gate = lambda batch: "no room for batch 3" if batch == 3 and buffer.committed < 2 else ""
    buffer.checkpoint_now = lambda batch: True
    assert await train(buffer, run_file(tmp_path, trainer={"checkpoint_every": 100})) == 0
    assert [e[1] for e in buffer.kinds("commit")] == [2, 4]


async def test_a_checkpoint_on_request(tmp_path):
    """RequestCheckpoint while the trainer waits: written, committed, and repeated requests are one."""
    buffer, run = FakeBuffer(), run_file(tmp_path, trainer={"checkpoint_every": 100})
    waiting, committed = asyncio.Event(), asyncio.Event()
    buffer.on_event = lambda e: waiting.set() if e[:2] == ("publish", 1) else committed.set() if e[0] == "commit" else None
    buffer.gate = lambda batch: "" if batch == 1 or committed.is_set() else "held"
    async with rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        start = Start(run, server.address)
        await start.ready.wait()
        servicer = TrainerServicer(start.loop)
        await waiting.wait()
        replies = [await servicer.RequestCheckpoint(trainer_pb2.RequestCheckpointRequest(), None) for _ in range(2)]
        assert [r.step for r in replies] == [1, 1]
        await committed.wait()
        assert await start.code == 0
    progress = await servicer.GetProgress(trainer_pb2.GetProgressRequest(), None)
    assert (progress.step, progress.steps, progress.checkpoint_step, progress.incarnation) == (4, 4, 4, 1)
    assert progress.published.step == 4 and progress.metrics["step"] == 4
    assert [e[1] for e in buffer.kinds("commit")] == [1, 4]


async def test_damaged_bodies_are_read_again(tmp_path):
    """A body whose checksum is wrong is fetched once more; nothing wrong is ever trained."""
    buffer = FakeBuffer()
    buffer.damaged_reads = 2
    assert await train(buffer, run_file(tmp_path)) == 0


async def test_bodies_that_come_with_their_batch_are_not_read(tmp_path):
    """Unless one of them is not what the composition says, or they are too few: then all are read as if none had come."""
    buffer = FakeBuffer()
    buffer.brings = lambda batch, bodies: {
        1: bodies, 2: [*bodies[:-1], bodies[0]], 3: bodies[1:], 4: []}[batch]
    assert await train(buffer, run_file(tmp_path)) == 0
    assert buffer.reads == [2, 3, 4]
    digests = [[sample[2] for sample in line["samples"]] for line in lines(tmp_path / "audit" / "trainer.jsonl")]
    assert digests == [[crc32c(encode(m.sample)) for g in buffer.groups(k) for m in g.members] for k in (1, 2, 3, 4)]


async def test_a_number_may_come_with_the_announcement_before(tmp_path):
    """The buffer reserves one for the next step that is due; another step (the run's last) asks for its own. A buffer of a
    former release reserves none, and the trainer asks each time."""
    buffer = FakeBuffer()
    buffer.reserves_ahead = True
    assert await train(buffer, run_file(tmp_path / "a", run={"steps": 4}, trainer={"publish_every": 3})) == 0
    assert [e[1] for e in buffer.kinds("publish")] == [0, 3, 4] and [e[1] for e in buffer.kinds("reserve")] == [0, 4]
    numbers = [e[2].number for e in buffer.kinds("publish")]
    assert numbers == sorted(set(numbers)), "each has a number of its own"
    old = FakeBuffer()
    assert await train(old, run_file(tmp_path / "b", run={"steps": 4})) == 0
    assert [e[1] for e in old.kinds("reserve")] == [0, 1, 2, 3, 4]


async def test_the_target_ends_the_run_early(tmp_path):
    """Ten steps at the target: the run is finished, with a version, a checkpoint and a model of that step."""
    buffer = FakeBuffer(steps=50, rewards=(0.9, 0.7))
    run = run_file(tmp_path, run={"steps": 50, "target_reward": 0.8}, trainer={"checkpoint_every": 100})
    assert await train(buffer, run) == 0
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")][-1] == 10
    assert [e[1] for e in buffer.kinds("commit")] == [10]
    assert (tmp_path / "model" / "config.json").exists()


async def test_a_finished_run_is_finished_again(tmp_path):
    """Started once more, the trainer resumes at the end, publishes, and leaves; nothing is trained."""
    buffer, run = FakeBuffer(), run_file(tmp_path)
    assert await train(buffer, run) == 0
    leases = len(buffer.kinds("lease"))
    assert await train(buffer, run) == 0
    assert len(buffer.kinds("lease")) == leases
    assert buffer.kinds("publish")[-1][1] == 4


async def test_publications_are_sparse_when_asked(tmp_path):
    """publish_every = 3 of 4 steps: versions 0, 3 and, because it is the last, 4."""
    buffer = FakeBuffer()
    assert await train(buffer, run_file(tmp_path, trainer={"publish_every": 3})) == 0
    assert [e[1] for e in buffer.kinds("publish")] == [0, 3, 4]


async def test_a_missing_model_is_one_line(tmp_path, caplog):
    """Exit code 2, the code of configuration errors, and a message that names the setting."""
    run = run_file(tmp_path, model={"build": None, "path": str(tmp_path / "nowhere")})
    assert await train(FakeBuffer(), run) == 2
    assert "is not a directory" in caplog.text and "Traceback" not in caplog.text


async def test_warm_up_is_kept(tmp_path, monkeypatch):
    """Its result is checkpoint 0: a restart, even before the first batch, does not warm up again."""
    warmups = []

    async def counted(*arguments: Any) -> Any:
        warmups.append(arguments)
        return await warm_up(*arguments)
    monkeypatch.setattr(loop_module, "warm_up", counted)
    run = run_file(tmp_path, run={"steps": 1}, trainer={"warmup": {"steps": 3}, "checkpoint_every": 1})
    buffer = FakeBuffer(steps=1)
    async with rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        first = Start(run, server.address)

        def stop_once_all_has_begun(batch: int) -> str:
            if buffer.kinds("publish"):
                first.lifecycle.request_stop("SIGTERM")
            return "held"

        buffer.gate = stop_once_all_has_begun
        assert await first.code == 0
        buffer.gate = lambda batch: ""
        assert await Start(run, server.address).code == 0
    assert [e[1:] for e in buffer.kinds("incarnation")] == [(1, 0), (2, 0)]
    published = [e[2] for e in buffer.kinds("publish") if e[1] == 0]
    store = FileStore(tmp_path / "objects")
    contents = [await read_tensors(store, await read_manifest(store, v)) for v in published]
    assert [bytes(t.data) for t in contents[0]] == [bytes(t.data) for t in contents[1]]
    assert len(warmups) == 1


def test_figures_that_are_not_finite_are_null(tmp_path):
    """A learning rate that overflowed, a ratio of 0 to 0: the line says null, at any depth, and the trainer goes on."""
    records = Records(tmp_path)
    infinite = float("inf")
    records.metrics({"step": 1, "loss": float("nan"), "lags": {"0": infinite}, "ends": [-infinite, 0.5], "alarms": None})
    records.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": None, "lags": {"0": None}, "ends": [None, 0.5], "alarms": None}]


async def test_records_survive_a_torn_line(tmp_path):
    """A line without an end, as a kill leaves it, spoils neither the audit's next line nor the metrics."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "trainer.jsonl").write_text('{"batch": 1, "samples": [[0, 0, 1, 0]]}\n{"batch": 2, "sam')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    records = Records(tmp_path)
    assert records.resume(1) == [{"step": 1}]
    records.metrics({"step": 2, "again": True})
    records.audit(2, 5, [(3, 4, 5, 0, 6)])
    records.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "again": True}]
    assert json.loads((tmp_path / "audit" / "trainer.jsonl").read_text().splitlines()[-1])["samples"] == [[3, 4, 5, 0, 6]]
