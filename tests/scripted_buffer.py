"""A buffer that a test scripts, a rollout service against it over real gRPC, and an environment of a few turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.rollout.service import start
from services.rollout.weights import Weights
from slipstream import config, rpc
from slipstream.environment import Action, Environment, Episode, Reset, Step, Task
from slipstream.errors import Fenced, to_status
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.objects import open_store
from slipstream.protos.buffer.v1 import policy_pb2, policy_pb2_grpc, samples_pb2, samples_pb2_grpc
from slipstream.protos.types.v1 import policy_pb2 as types_policy_pb2
from slipstream.sample import Sample, decode
from slipstream.service import open_context
from slipstream.service_command import ServiceArguments
from tests.rollout_runs import publish, run_file

Version = types_policy_pb2.PolicyVersion


class Turns(Environment):
    """Task index t takes 1 + t % 3 turns; index 7 fails at reset, index 8 at the first step."""

    inline = True

    def reset(self, task: Task) -> Reset:
        if task.index == 7:
            raise RuntimeError("no such room")
        return Reset("12=")

    def step(self, episode: Episode, action: Action) -> Step:
        if episode.task.index == 8:
            raise RuntimeError("the floor gave way")
        done = episode.turn > episode.task.index % 3
        return Step(None if done else "3=", done=done, reward=1.0)


class ScriptedBuffer(samples_pb2_grpc.SampleServiceServicer, policy_pb2_grpc.PolicyServiceServicer):
    """Grants what a test puts in, keeps what comes back."""

    def __init__(self) -> None:
        self.grants: list[samples_pb2.SampleLease] = []
        self.versions: list[Version] = []
        self.asked: list[samples_pb2.LeaseSamplesRequest] = []
        self.submits: list[list[samples_pb2.SubmittedSample]] = []
        self.partials: list[samples_pb2.PartialSample] = []
        self.released: list[int] = []
        self.holds: list[int] = []
        self.beats: list[set[int]] = []
        self.lists = 0
        self.fenced: set[int] = set()
        self.answer: Callable[[samples_pb2.SubmittedSample], Exception | None] = lambda sample: None
        self.changed = asyncio.Condition()

    @property
    def submitted(self) -> dict[int, samples_pb2.SubmittedSample]:
        return {s.lease.sample.draw.number: s for lot in self.submits for s in lot}

    def sample(self, draw: int) -> Sample:
        return decode(self.submitted[draw].body)

    async def grant(self, *draws: int, index: int | None = None, **fields: Any) -> None:
        """Make one sample of each draw leasable; the task index is the draw's number unless given."""
        for draw in draws:
            lease = samples_pb2.SampleLease(group_size=1, seed=1000 + draw, **fields)
            lease.lease.sample.draw.ledger_epoch, lease.lease.sample.draw.number, lease.lease.attempt = 1, draw, 1
            lease.task.environment, lease.task.index, lease.task.seed = "e", draw if index is None else index, draw
            self.grants.append(lease)
        await self.notify()

    async def announce(self, version: Version) -> None:
        self.versions.insert(0, version)
        await self.notify()

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, predicate: Callable[[], object]) -> None:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(predicate)

    async def LeaseSamples(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        await self.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rpc.seconds(request.wait)), self.changed:
                await self.changed.wait_for(lambda: self.grants)
        granted, self.grants = self.grants[: request.max_samples], self.grants[request.max_samples :]
        return samples_pb2.LeaseSamplesResponse(leases=granted, ttl=rpc.duration(60), waiting_for="a test to grant something")

    async def SubmitSamples(self, request: Any, context: Any) -> Any:
        self.submits.append(list(request.samples))
        await self.notify()
        return samples_pb2.SubmitSamplesResponse(results=[
            samples_pb2.SubmitResult(status=to_status(self.answer(s)), outcome=samples_pb2.OUTCOME_ACCEPTED)
            for s in request.samples])

    async def HeartbeatSamples(self, request: Any, context: Any) -> Any:
        draws = [lease.sample.draw.number for lease in request.leases]
        self.beats.append(set(draws))
        await self.notify()
        return samples_pb2.HeartbeatSamplesResponse(
            statuses=[to_status(Fenced("re-granted") if d in self.fenced else None) for d in draws])

    async def SubmitPartials(self, request: Any, context: Any) -> Any:
        self.partials += request.partials
        return samples_pb2.SubmitPartialsResponse(statuses=[to_status(None) for _ in request.partials])

    async def ReleaseSamples(self, request: Any, context: Any) -> Any:
        self.released += [lease.sample.draw.number for lease in request.leases]
        return samples_pb2.ReleaseSamplesResponse(statuses=[to_status(None) for _ in request.leases])

    async def WatchVersions(self, request: Any, context: Any) -> Any:
        after = request.after
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda seen=after: self.versions and self.versions[0].number > seen)
            after = self.versions[0].number
            yield policy_pb2.WatchVersionsResponse(version=self.versions[0])

    async def ListVersions(self, request: Any, context: Any) -> Any:
        self.lists += 1
        await self.notify()
        return policy_pb2.ListVersionsResponse(versions=self.versions[: request.limit or None])

    async def HoldVersion(self, request: Any, context: Any) -> Any:
        self.holds.append(request.version)
        await self.notify()
        return policy_pb2.HoldVersionResponse()


def slow_store(monkeypatch: pytest.MonkeyPatch, buffer: ScriptedBuffer) -> None:
    """From now on a version's objects come only once the buffer was asked to hold it."""
    plain = Weights._read

    async def read(self: Weights, version: Version) -> Any:
        await buffer.until(lambda: version.number in buffer.holds)
        return await plain(self, version)

    monkeypatch.setattr("services.rollout.weights.HOLD_AFTER_S", 0.01)
    monkeypatch.setattr(Weights, "_read", read)


@contextlib.asynccontextmanager
async def service(run: config.RunFile, buffer: ScriptedBuffer, port: int = 0):
    """The rollout service in this process, stopped in stages at the end; yields its context."""
    registrations = [
        (samples_pb2_grpc.add_SampleServiceServicer_to_server, buffer),
        (policy_pb2_grpc.add_PolicyServiceServicer_to_server, buffer)]
    async with rpc.Server("127.0.0.1", 0, registrations, grace_s=0) as server:
        lifecycle = Lifecycle(SystemClock(), 20)
        arguments = ServiceArguments(run, "rollout", "rollout-0", server.address, port=port)
        async with open_context(arguments, lifecycle, lifecycle.clock) as context:
            await start(context)
            running = asyncio.create_task(lifecycle.run())
            try:
                yield context
            finally:
                lifecycle.request_stop("the test is over")
                assert await running == 0, lifecycle.reason


def turns(folder: Path, **sections: Any) -> config.RunFile:
    sections["service"] = {"metrics": False}
    return run_file(folder, f"{__name__}:Turns", **sections)


async def published(run: config.RunFile, buffer: ScriptedBuffer, number: int, step: int, seed: int = 0) -> Version:
    async with open_store(run.objects_url) as store:
        version = await publish(store, run, number, step, seed)
    await buffer.announce(version)
    return version
