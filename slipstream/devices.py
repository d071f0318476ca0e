"""Whose turn it is on the devices of a machine, where trainer and rollout workers share them: run.placement = "shared".

    devices.wanted   locked by the trainer while it has a batch to train, or has the devices
    devices.held     locked by whoever may have memory on the devices: the trainer alone, or all rollout workers together

    rollout worker   wait until nobody wants them ─► lock `held`, with others ─► wake, generate ─► wanted: sleep ─► unlock
    trainer          a batch is there: lock `wanted` ─► lock `held`, alone ─► come, train, leave ─► unlock both

Both are locks of the kernel (flock) on files of the run folder. The kernel frees them when their process ends, however it ends,
and at no other time: memory on a device goes the same way, so a lock never says less than the truth. A lease with a time limit
would: it lapses while a frozen process still fills the device.

The trainer goes first, and cannot starve the others: batches come from them. Nobody waits for a worker while it has a lock, so
there is no circle. The kernel tells nobody that a lock is free: who waits asks again every POLL_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream import logs
from slipstream.lifecycle import Clock, Waits
from slipstream.telemetry import DeviceMetrics

POLL_S = 0.02
WANTED, HELD = "devices.wanted", "devices.held"

log = logs.get("devices")


class Devices:
    """One process's part in sharing them. Not thread-safe: it belongs to one event loop."""

    def __init__(self, folder: Path, waits: Waits, clock: Clock, metrics: DeviceMetrics, stopping: asyncio.Event) -> None:
        self._waits, self._clock, self._metrics, self._stopping = waits, clock, metrics, stopping
        self._wanted, self._lock = _Lock(folder / WANTED), _Lock(folder / HELD)
        self._since: float | None = None

    @property
    def held(self) -> bool:
        """Whether this process may have memory on the devices."""
        return self._since is not None

    @property
    def wanted(self) -> bool:
        """Whether the trainer wants them, or has them. Of rollout workers: the trainer itself must not ask."""
        if not self._wanted.take(alone=False):
            return True
        self._wanted.free()
        return False

    async def take_alone(self) -> bool:
        """The trainer's: until no other process has the devices. False, without them, when a stop came first."""
        asked = self._clock.monotonic()
        try:
            with self._waits.on("the devices: rollout workers are to leave them"):
                taken = await self._until(lambda: self._wanted.take(alone=True)) and await self._until(
                    lambda: self._lock.take(alone=True))
        except BaseException:
            self._free()
            raise
        if not taken:
            self._free()
            return False
        self._metrics.handover_seconds.labels("asked").inc(self._clock.monotonic() - asked)
        self._took()
        return True

    async def take_together(self) -> bool:
        """A rollout worker's: until the trainer neither has the devices nor wants them. False when a stop came first."""
        with self._waits.on("the devices: the trainer's turn", patient=True):
            taken = await self._until(lambda: not self.wanted and self._lock.take(alone=False))
        if taken:
            self._took()
        return taken

    async def until_wanted(self) -> bool:
        """A rollout worker's: until the trainer asks for the devices. False when a stop came first."""
        return await self._until(lambda: self.wanted)

    def give(self) -> None:
        """Let others have them. The caller has no memory there any more. Nothing without them."""
        if self._since is not None:
            held_s, self._since = self._clock.monotonic() - self._since, None
            self._metrics.held.set(0)
            self._metrics.held_seconds.inc(held_s)
            log.info("devices given back", held_s=round(held_s, 3))
            self._free()

    @contextlib.contextmanager
    def moving(self, way: str) -> Iterator[None]:
        """Count the time of the block as handing over: `enter` or `leave`."""
        started = self._clock.monotonic()
        try:
            yield
        finally:
            self._metrics.handover_seconds.labels(way).inc(self._clock.monotonic() - started)

    def _took(self) -> None:
        self._since = self._clock.monotonic()
        self._metrics.held.set(1)
        log.info("devices taken")

    def _free(self) -> None:
        self._lock.free()
        self._wanted.free()

    async def _until(self, true: Callable[[], bool]) -> bool:
        """Whether it became so before a stop was asked for."""
        while not true():
            if self._stopping.is_set():
                return False
            await self._clock.sleep(POLL_S)
        return True


class _Lock:
    """A lock of the kernel on a file, which is made when it is first asked for and never deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def take(self, alone: bool) -> bool:
        """Take it, alone or with others, if that can be had now. Again is no harm."""
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def free(self) -> None:
        """Give it up. Nothing without it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
