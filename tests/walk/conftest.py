"""The stage of the walk: a buffer, an object store, an environment, an engine, scorers and a learner, all real."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.reward.sandbox import Sandbox
from services.reward.scorers import Scorers
from services.rollout.torch_engine import TorchEngine
from services.trainer.learner import Learner
from services.trainer.warmup import row
from slipstream.config import RunFile
from slipstream.environment import Task, connect
from slipstream.environments.sort_digits import SortDigits
from slipstream.manifest import RawTensor
from slipstream.model import load_state
from slipstream.objects import FileStore
from tests.buffer_client import buffer
from tests.redis_server import RedisProcess
from tests.rollout_runs import run_file
from tests.walk import hops

PRACTICE = 1 << 40  # indexes of tasks that no run draws


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """Two digits to sort; four groups of four samples a batch; an answer has room for both digits and its end."""
    return run_file(
        tmp_path_factory.mktemp("walk"), environment={"name": "sort-digits", "args": {"shortest": 2, "longest": 2}},
        schedule={"groups_per_batch": 4, "group_size": 4, "max_lag": 1}, rollout={"max_new_tokens": 3},
        trainer={"learning_rate": 1e-3})


@pytest.fixture(scope="session")
def practised(run: RunFile) -> list[RawTensor]:
    """Weights that are right about every other time, so that there is something to learn from: a dozen supervised steps."""
    learner, environment, loss, task = Learner(run), SortDigits(2, 2), 1.0, PRACTICE
    while loss > 0.5:
        rows = [row(learner.tokenizer, environment.reset(Task(task + i, 0))) for i in range(32)]
        loss, task = learner.supervised_step(rows, 1e-2, "practice"), task + 32
    return learner.weights()


class Pace:
    """The engine tells it of every decode step, and can be held there: what happens in between happens at a known token."""

    def __init__(self) -> None:
        self._steps, self._held, self._go = 0, threading.Event(), threading.Event()

    def __call__(self, seconds: float) -> None:
        self._steps -= 1
        if self._steps == 0:
            self._held.set()
            self._go.wait(30)

    def hold_after(self, steps: int) -> None:
        self._steps = steps

    async def held(self) -> None:
        assert await asyncio.to_thread(self._held.wait, 30)

    def go_on(self) -> None:
        self._go.set()


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
async def walk(
    run: RunFile, practised: list[RawTensor], redis: RedisProcess, tmp_path: Path, pace: Pace,
) -> AsyncIterator[hops.Walk]:
    """Everything is in place: version 1, of step 0, is published, and the engine has loaded it."""
    learner = Learner(run)
    load_state(learner.model, practised)
    engine = TorchEngine(run, observe=pace)
    async with (
        buffer(redis, tmp_path / "objects", run, tasks=0) as client,
        connect(run.environments[0]) as environment,
        Sandbox() as sandbox,
    ):
        walk = hops.Walk(run, client, FileStore(tmp_path / "objects"), environment, engine, Scorers(sandbox), learner)
        await client.take_incarnation()
        await hops.start_engine(walk, await hops.publish(walk, 0))
        yield walk
        await engine.stop()
