"""The locks by which trainer and rollout workers take turns on devices: who may have them, and what a death leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from slipstream.devices import HELD, WANTED, Devices
from slipstream.lifecycle import SystemClock, Waits
from slipstream.telemetry import DeviceMetrics, figures

SOON_S = 5.0


def party(folder: Path, stopping: asyncio.Event | None = None, registry: CollectorRegistry | None = None) -> Devices:
    """One process's part; locks on open files, so that several may be in one process."""
    clock = SystemClock()
    metrics = DeviceMetrics(registry or CollectorRegistry())
    return Devices(folder, Waits(clock), clock, metrics, stopping or asyncio.Event())


async def test_workers_share_the_devices_and_the_trainer_has_them_alone(tmp_path: Path) -> None:
    """Two workers hold them together. The trainer gets them when the last has left, and no worker while it wants them."""
    first, second, trainer = (party(tmp_path) for _ in range(3))
    assert await first.take_together() and await second.take_together()
    taking = asyncio.create_task(trainer.take_alone())
    async with asyncio.timeout(SOON_S):
        assert await first.until_wanted() and await second.until_wanted()
        first.give()
        back = asyncio.create_task(first.take_together())  # not before the trainer, although `second` is still there
        await asyncio.sleep(0.1)
        assert not taking.done() and not back.done()
        second.give()
        assert await taking and not back.done() and not first.held
        trainer.give()
        assert await back and not first.wanted


async def test_a_stop_ends_every_wait_without_a_lock(tmp_path: Path) -> None:
    """A trainer that is asked to stop while workers have the devices wants them no more: nobody sleeps for it."""
    stopping, registry = asyncio.Event(), CollectorRegistry()
    worker, trainer = party(tmp_path), party(tmp_path, stopping, registry)
    assert await worker.take_together()
    taking = asyncio.create_task(trainer.take_alone())
    async with asyncio.timeout(SOON_S):
        assert await worker.until_wanted()
        stopping.set()
        assert not await taking and not worker.wanted and not trainer.held
    assert figures(registry)["devices_held_seconds_total"] == 0


async def test_a_cancelled_wait_leaves_no_wish_behind(tmp_path: Path) -> None:
    """A start that is cancelled between its two locks gives the first one back."""
    worker, trainer = party(tmp_path), party(tmp_path)
    assert await worker.take_together()
    taking = asyncio.create_task(trainer.take_alone())
    async with asyncio.timeout(SOON_S):
        assert await worker.until_wanted()
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert not worker.wanted


async def test_turns_are_counted(tmp_path: Path) -> None:
    """A gauge of now, a counter of the turns' length, and what handing over costs."""
    registry = CollectorRegistry()
    trainer = party(tmp_path, registry=registry)
    assert await trainer.take_alone() and figures(registry)["devices_held"] == 1
    with trainer.moving("leave"):
        await asyncio.sleep(0.02)
    trainer.give()
    found = figures(registry)
    assert found["devices_held"] == 0 and min(found[f"devices_{what}_seconds_total"] for what in ("handover", "held")) >= 0.02


@contextlib.contextmanager
def holder(folder: Path, alone: bool) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the devices, and would keep them."""
    code = (
        "import fcntl, os, sys, time\n"
        f"for name in ({WANTED!r}, {HELD!r})[{0 if alone else 1}:]:\n"
        "    fd = os.open(os.path.join(sys.argv[1], name), os.O_RDWR | os.O_CREAT)\n"
        f"    fcntl.flock(fd, fcntl.{'LOCK_EX' if alone else 'LOCK_SH'})\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("alone", [True, False])
async def test_the_death_of_a_holder_frees_the_devices(tmp_path: Path, alone: bool) -> None:
    """kill -9 of either side lets the other go on at once: the kernel frees what the dead held. A frozen holder keeps them,
    as it keeps its memory on them."""
    other = party(tmp_path)
    with holder(tmp_path, alone) as process:
        os.kill(process.pid, signal.SIGSTOP)
        taking = asyncio.create_task(other.take_together() if alone else other.take_alone())
        await asyncio.sleep(0.1)
        assert not taking.done()
        process.kill()
        async with asyncio.timeout(SOON_S):
            assert await taking and other.held
