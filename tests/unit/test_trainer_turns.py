"""The trainer's loop where it shares its devices with rollout workers: when it has them, and when it leaves them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer import turns
from services.trainer.learner import Learner
from slipstream import rpc
from slipstream.devices import Devices
from slipstream.errors import ConfigError
from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import run_file
from tests.unit.test_devices import SOON_S, party
from tests.unit.test_trainer_loop import Start


async def work(worker: Devices, turns: list[str]) -> None:
    """A rollout worker that only has the devices, whenever it may."""
    while await worker.take_together():
        turns.append("worker")
        await worker.until_wanted()
        turns.append("given")
        worker.give()


async def test_it_has_the_devices_to_start_and_to_train_and_never_beside_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four steps against a buffer whose batches take a while: torch works in the trainer's turns only, it leaves the device at
    the end of each, and a worker has its turn between two steps. The same when it is started again with nothing to train."""
    (tmp_path / "run").mkdir()
    buffer, run, seen = FakeBuffer(), run_file(str(tmp_path / "run"), run={"placement": "shared"}), []
    worker = party(tmp_path / "run")
    for name in ("step", "leave_device", "enter_device", "weights", "save_pretrained"):
        def told(self: Any, *arguments: Any, name: str = name, real: Any = getattr(Learner, name)) -> Any:
            assert not worker.held, f"{name} in a worker's turn"
            seen.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(Learner, name, told)
    lease = buffer.LeaseBatch

    async def slowly(request: Any, context: Any) -> Any:  # a batch is made in the workers' turn
        while seen.count("leave_device") < request.batch or not worker.held:  # noqa: ASYNC110 - seen in the torch thread
            await asyncio.sleep(0.01)
        return await lease(request, context)

    buffer.LeaseBatch = slowly  # pyright: ignore[reportAttributeAccessIssue]
    working = asyncio.create_task(work(worker, seen))
    async with asyncio.timeout(60), rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        assert await Start(run, server.address).code == 0
        once, seen[:] = seen[:], []
        assert await Start(run, server.address).code == 0
    working.cancel()
    assert seen.index("leave_device") < seen.index("enter_device") < seen.index("save_pretrained")  # a finished run again
    seen = once[:-1] if once[-1] == "worker" else once  # it may, or may not, have had time for one more turn
    turn = ["given", "enter_device", "step", "weights"]
    start = seen.index("leave_device")
    assert "step" not in seen[:start]
    between = ["leave_device", "worker"]
    assert seen[start:] == [*between, *3 * [*turn, *between], *turn, "save_pretrained", "leave_device"]
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]


async def test_a_stop_while_workers_have_the_devices_is_a_stop(tmp_path: Path) -> None:
    """A worker that never leaves them, frozen: the trainer, at its start, ends with 0 all the same."""
    buffer, run, frozen = FakeBuffer(), run_file(str(tmp_path), run={"placement": "shared"}), party(tmp_path)
    assert await frozen.take_together()
    async with asyncio.timeout(SOON_S), rpc.Server("127.0.0.1", 0, buffer.registrations) as server:
        start = Start(run, server.address)
        await start.ready.wait()
        assert await frozen.until_wanted()
        start.lifecycle.request_stop("test")
        assert await start.code == 0
    assert not frozen.wanted


def test_ranks_of_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's variables say so: a lock of this machine says nothing of theirs."""
    turns._one_machine()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="4 ranks of the trainer, 2 of them"):
        turns._one_machine()
