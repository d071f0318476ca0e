"""An engine on devices that the trainer uses, too: it has memory there in the workers' turns, and sleeps in the trainer's.

consumes: the trainer's wish for the devices (slipstream.devices)    produces: an engine that sleeps and wakes
waits for: the trainer's turn to end; a start or a swap under way, before it sleeps
unblocked by: the trainer giving the devices back, or its end; the start's or the swap's end

While it sleeps, requests wait as during a swap, those in flight keep what they have, and aborts are answered. A start or a swap
that comes waits for the workers' turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from services.rollout.concurrency import Load
from services.rollout.engine import Ended, Engine, Generation, Request
from slipstream.devices import Devices
from slipstream.manifest import RawTensor
from slipstream.probes import Probes
from slipstream.protos.types.v1 import policy_pb2


class SharedEngine:
    """See services.rollout.engine.Engine; `take_turns` is to run beside it."""

    def __init__(self, engine: Engine, devices: Devices) -> None:
        self._engine, self._devices = engine, devices
        self._turn, self._moving = asyncio.Event(), asyncio.Lock()
        self._asleep = False

    async def take_turns(self) -> None:
        """To the end of the process: have the devices until the trainer wants them, and again once it has done."""
        while await self._devices.take_together():
            if self._asleep:
                with self._devices.moving("enter"):
                    await self._engine.wake()
                self._asleep = False
            self._turn.set()
            if not await self._devices.until_wanted():
                return
            self._turn.clear()
            async with self._moving:
                if self._engine.version is not None:
                    self._asleep = True
                    with self._devices.moving("leave"):
                        await self._engine.sleep()
            self._devices.give()

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """The block runs in a turn of the workers, which does not end before it."""
        while True:
            await self._turn.wait()
            async with self._moving:
                if self._turn.is_set():
                    yield
                    return

    async def start(
        self, files: Mapping[str, bytes], tensors: Sequence[RawTensor], version: policy_pb2.PolicyVersion,
        probes: Probes | None = None,
    ) -> None:
        async with self._in_turn():
            await self._engine.start(files, tensors, version, probes)

    async def swap(
        self, version: policy_pb2.PolicyVersion, tensors: Sequence[RawTensor], probes: Probes | None = None,
    ) -> None:
        async with self._in_turn():
            await self._engine.swap(version, tensors, probes)

    @property
    def active(self) -> int:
        """Sequences that are being decoded: none while it sleeps."""
        return 0 if self._asleep else self._engine.active

    # the engine's own

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._engine.stop_token_ids

    @property
    def version(self) -> policy_pb2.PolicyVersion | None:
        return self._engine.version

    @property
    def free_slots(self) -> int:
        return self._engine.free_slots

    @property
    def load(self) -> Load | None:
        return self._engine.load

    @property
    def generated_tokens(self) -> int:
        return self._engine.generated_tokens

    def check(self, request: Request) -> None:
        self._engine.check(request)

    def submit(self, requests: Sequence[Request], ended: Ended) -> None:
        self._engine.submit(requests, ended)

    def generate(self, request: Request) -> asyncio.Future[Generation]:
        return self._engine.generate(request)

    def stream(self, request: Request) -> AsyncGenerator[Generation]:
        return self._engine.stream(request)

    def abort(self, requests: Iterable[int]) -> None:
        self._engine.abort(requests)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def stop(self) -> None:
        await self._engine.stop()
        self._devices.give()
