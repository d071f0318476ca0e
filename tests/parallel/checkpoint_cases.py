"""Checkpoints of a world, with the conductor as it is in a run: rank 0 leads, the others follow."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from torch import distributed as dist

from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from services.trainer.parallel import checkpoints as parallel_checkpoints
from services.trainer.parallel.checkpoints import Led
from services.trainer.parallel.conductor import Lead, follow
from slipstream.config import RunFile
from slipstream.errors import Unavailable
from slipstream.objects import FileStore
from tests.parallel import learner_cases
from tests.trainer_samples import groups


def run(folder: Path, parallel: dict[str, Any]) -> RunFile:
    made = learner_cases.run("qwen3_moe", parallel)
    return made.model_copy(update={"objects": made.objects.model_copy(update={"url": f"file://{folder}/objects"})})


def digest(learner: Any) -> str:
    """Of the weights, whole."""
    found = hashlib.sha256()
    for tensor in learner.weights():
        found.update(tensor.name.encode() + bytes(tensor.data))
    return found.hexdigest()


def step(learner: Any, number: int) -> None:
    learner.step(groups(5, seed=number), number)


async def _saved(learner: Any, checkpoints: Checkpoints, number: int) -> None:
    snapshot = await asyncio.to_thread(learner.snapshot)
    await checkpoints.save(snapshot, step=number, incarnation=1, ledger_sequence=0)


async def written(learner: Any, checkpoints: Checkpoints) -> dict[str, Any]:
    """Two steps, and a checkpoint of them that is written while the third runs."""
    await checkpoints.open()
    await checkpoints.take_over(1)
    for number in (1, 2):
        await asyncio.to_thread(step, learner, number)
    second = await asyncio.to_thread(digest, learner)
    snapshot = await asyncio.to_thread(learner.snapshot)
    header, _ = await asyncio.gather(
        checkpoints.save(snapshot, step=2, incarnation=1, ledger_sequence=0), asyncio.to_thread(step, learner, 3))
    return {"name": header.name, "2": second, "3": await asyncio.to_thread(digest, learner)}


async def resumed(learner: Any, checkpoints: Checkpoints) -> dict[str, Any]:
    """The checkpoint in force, and a step after it."""
    await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None
    await asyncio.to_thread(learner.load, loaded[1])
    at_once = await asyncio.to_thread(digest, learner)
    await asyncio.to_thread(step, learner, 3)
    return {"name": loaded[0].name, str(loaded[0].step): at_once, "3": await asyncio.to_thread(digest, learner)}


async def refused_once(learner: Any, checkpoints: Checkpoints) -> dict[str, Any]:
    """A follower's disk is full the first time; the second attempt, of all ranks, is whole."""
    await checkpoints.open()
    await checkpoints.take_over(1)
    await asyncio.to_thread(step, learner, 1)
    snapshot, told = await asyncio.to_thread(learner.snapshot), ""
    try:
        await checkpoints.save(snapshot, step=1, incarnation=1, ledger_sequence=0)
    except Unavailable as error:
        told = error.message
    between = checkpoints.pointer.step
    await checkpoints.save(snapshot, step=1, incarnation=1, ledger_sequence=0)
    await asyncio.to_thread(step, learner, 2)  # the ranks are in step
    await _saved(learner, checkpoints, 2)
    return {"told": told, "between": between, "after": checkpoints.pointer.step}


async def killed(learner: Any, checkpoints: Checkpoints) -> dict[str, Any]:
    """A follower dies while it writes its shards."""
    await checkpoints.open()
    await checkpoints.take_over(1)
    await asyncio.to_thread(step, learner, 1)
    await _saved(learner, checkpoints, 1)
    await asyncio.to_thread(step, learner, 2)
    failure = ""
    try:
        await _saved(learner, checkpoints, 2)
    except Exception as error:
        failure = type(error).__name__
    os._exit(7 if failure and checkpoints.pointer.step == 1 else 8)  # as a trainer that cannot go on


class Faulty(FileStore):
    """A store whose `put` of a shard fails once, or ends the process at the second checkpoint."""

    left = 1
    how = "full"

    async def put(self, key: str, data: Any, durable: bool = True) -> None:
        if self.how == "full" and Faulty.left:
            Faulty.left -= 1
            raise Unavailable("the disk of this rank is full")
        if self.how == "kill" and "/00000002-" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().put(key, data, durable)


def world(folder: str, scenario: str, fault: str = "") -> dict[str, Any]:
    """A scenario on every rank; what it returns is rank 0's."""
    made = run(Path(folder), dict(ranks=dist.get_world_size(), experts=2, exchange="flat"))
    if dist.get_rank():
        if fault:
            Faulty.how = fault
            parallel_checkpoints.open_store = _faulty  # of this process alone
        follow(made)
        return {}
    work: Callable[[Any, Checkpoints], Awaitable[dict[str, Any]]] = globals()[scenario]

    async def led() -> dict[str, Any]:
        lead = Lead(made)
        store = FileStore(Path(folder) / "objects")
        found = await work(lead, Led(store, made.run.name, 2, lead))
        await asyncio.to_thread(lead.close)
        return found

    return asyncio.run(led())


def alone(folder: Path, scenario: Callable[[Any, Checkpoints], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """The same in one process."""
    made = run(folder, {})
    store = FileStore(folder / "objects")

    async def work() -> dict[str, Any]:
        return await scenario(Learner(made), Checkpoints(store, made.run.name, 2))

    return asyncio.run(work())


class _faulty:
    """open_store, of a disk that fails."""

    def __init__(self, url: str, *_: Any) -> None:
        self._store = Faulty(url.removeprefix("file://"))

    async def __aenter__(self) -> Faulty:
        return self._store

    async def __aexit__(self, *_: Any) -> None:
        return None
