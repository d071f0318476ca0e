"""The trainer's turns on devices that rollout workers use, too (slipstream.devices). Where they are split, nothing happens.

    a batch is there ─► take: workers sleep; models and optimizers come from host memory ─► step ─► give: they go back there

While the trainer waits for a batch it has no turn: rollouts make that batch. What it does between two turns needs no device: it
publishes and writes checkpoints from host memory.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

from slipstream.devices import Devices
from slipstream.errors import ConfigError
from slipstream.service import ServiceContext
from slipstream.telemetry import DeviceMetrics


class Turns:
    """`in_torch` runs a function in the thread that owns the learner."""

    def __init__(self, context: ServiceContext, in_torch: Callable[..., Awaitable[Any]]) -> None:
        self._in_torch, self._devices, self._away = in_torch, None, False
        if context.run.run.placement == "shared":
            _one_machine()
            self._devices = Devices(
                context.run.folder, context.waits, context.clock, DeviceMetrics(context.registry), context.lifecycle.stopping)

    async def take(self, learner: Any = None) -> bool:
        """Have the devices, with `learner` on them. False, without them, when a stop came first. Again is no harm."""
        if self._devices is None or self._devices.held:
            return True
        if not await self._devices.take_alone():
            return False
        if self._away:
            with self._devices.moving("enter"):
                await self._in_torch(learner.enter_device)
            self._away = False
        return True

    async def give(self, learner: Any) -> None:
        """Leave the devices to the workers, if this process has them."""
        if self._devices is not None and self._devices.held:
            with self._devices.moving("leave"):
                await self._in_torch(learner.leave_device)
            self._away = True
            self._devices.give()


def _one_machine() -> None:
    """Raises ConfigError when torchrun started ranks on other machines, whose devices nobody here could lock."""
    here, everywhere = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if here != everywhere:
        raise ConfigError(
            f"run.placement = shared with {everywhere} ranks of the trainer, {here} of them on this machine: devices are "
            "shared on one machine; start all ranks there, or set placement = split")
