"""An engine that shares its devices: when it sleeps, what waits for its turn, and what goes on meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.rollout.shared_engine import SharedEngine
from tests.unit.test_devices import SOON_S, party


class Recorded:
    """An engine that says what is asked of it, and takes its time when told so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.version: Any = None
        self.active = 3
        self.loading = asyncio.Event()
        self.loading.set()

    async def start(self, *_: Any) -> None:
        await self.loading.wait()
        self.version = 1
        self.said.append("start")

    async def swap(self, *_: Any) -> None:
        self.said.append("swap begins")
        await self.loading.wait()
        self.said.append("swap")

    async def sleep(self) -> None:
        self.said.append("sleep")

    async def wake(self) -> None:
        self.said.append("wake")

    async def stop(self) -> None:
        self.said.append("stop")


async def test_it_sleeps_in_the_trainers_turn_and_a_swap_waits_for_its_own(tmp_path: Path) -> None:
    """Start, sleep, wake, swap, in this order; while it sleeps nothing is awaited of it."""
    engine, trainer = Recorded(), party(tmp_path)
    shared = SharedEngine(engine, party(tmp_path))  # pyright: ignore[reportArgumentType]
    assert await trainer.take_alone()  # as at a run's start: no version yet
    turns = asyncio.create_task(shared.take_turns())
    starting = asyncio.create_task(shared.start({}, [], None))  # pyright: ignore[reportArgumentType]
    await asyncio.sleep(0.05)
    assert engine.said == []
    trainer.give()
    async with asyncio.timeout(SOON_S):
        await starting
        assert shared.active == 3 and await trainer.take_alone()
        assert engine.said == ["start", "sleep"] and shared.active == 0
        swapping = asyncio.create_task(shared.swap(None, []))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.05)
        assert not swapping.done() and "swap begins" not in engine.said
        trainer.give()
        await swapping
    assert engine.said == ["start", "sleep", "wake", "swap begins", "swap"] and shared.active == 3
    turns.cancel()
    await shared.stop()
    assert await trainer.take_alone()  # a stopped engine has left the devices


async def test_a_swap_under_way_ends_before_the_engine_sleeps(tmp_path: Path) -> None:
    """The trainer waits for it: weights are never written into an engine that has no memory."""
    engine, trainer = Recorded(), party(tmp_path)
    shared = SharedEngine(engine, party(tmp_path))  # pyright: ignore[reportArgumentType]
    turns = asyncio.create_task(shared.take_turns())
    async with asyncio.timeout(SOON_S):
        await shared.start({}, [], None)  # pyright: ignore[reportArgumentType]
        engine.loading.clear()
        swapping = asyncio.create_task(shared.swap(None, []))  # pyright: ignore[reportArgumentType]
        taking = asyncio.create_task(trainer.take_alone())
        await asyncio.sleep(0.1)
        assert engine.said == ["start", "swap begins"] and not taking.done()
        engine.loading.set()
        await swapping
        assert await taking and engine.said == ["start", "swap begins", "swap", "sleep"]
    turns.cancel()


async def test_an_engine_that_does_not_wake_ends_its_process(tmp_path: Path) -> None:
    """What it raises comes out of the loop, which the lifecycle watches: the process ends, its lock with it."""
    engine, trainer = Recorded(), party(tmp_path)

    async def fail() -> None:
        raise RuntimeError("out of memory")

    engine.wake = fail  # pyright: ignore[reportAttributeAccessIssue]
    shared = SharedEngine(engine, party(tmp_path))  # pyright: ignore[reportArgumentType]
    turns = asyncio.create_task(shared.take_turns())
    async with asyncio.timeout(SOON_S):
        await shared.start({}, [], None)  # pyright: ignore[reportArgumentType]
        assert await trainer.take_alone()
        trainer.give()
        with pytest.raises(RuntimeError, match="out of memory"):
            await turns
