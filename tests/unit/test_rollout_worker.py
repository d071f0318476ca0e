"""The rollout service against a buffer that a test scripts: leases, versions, submits, heartbeats, drains; over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.concurrency import Load
from services.rollout.service import start
from services.rollout.torch_engine import TorchEngine
from services.rollout.worker import RolloutWorker
from slipstream import config, rpc
from slipstream.environment import Action, Environment, Episode, Reset, Step, Task
from slipstream.errors import Exhausted, Fenced, InvalidInput, from_rpc_error, to_status
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.objects import open_store
from slipstream.protos.buffer.v1 import policy_pb2, policy_pb2_grpc, samples_pb2, samples_pb2_grpc
from slipstream.protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.protos.types.v1 import policy_pb2 as types_policy_pb2
from slipstream.sample import FINISH_LENGTH, Sample, array, decode, tensor
from slipstream.service import ServiceContext, open_context
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


@contextlib.asynccontextmanager
async def service(run: config.RunFile, buffer: ScriptedBuffer):
    """The rollout service in this process, stopped in stages at the end; yields its context."""
    registrations = [
        (samples_pb2_grpc.add_SampleServiceServicer_to_server, buffer),
        (policy_pb2_grpc.add_PolicyServiceServicer_to_server, buffer)]
    async with rpc.Server("127.0.0.1", 0, registrations, grace_s=0) as server:
        lifecycle = Lifecycle(SystemClock(), 20)
        arguments = ServiceArguments(run, "rollout", "rollout-0", server.address)
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


@pytest.fixture
def buffer() -> ScriptedBuffer:
    return ScriptedBuffer()


async def published(run: config.RunFile, buffer: ScriptedBuffer, number: int, step: int, seed: int = 0) -> Version:
    async with open_store(run.objects_url) as store:
        version = await publish(store, run, number, step, seed)
    await buffer.announce(version)
    return version


async def test_leases_become_samples(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """Many leases are played together, over one to three turns, and submitted in few calls; failures of tasks are data."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    await buffer.grant(*range(12))
    async with service(run, buffer) as context:
        await buffer.until(lambda: len(buffer.submitted) == 12)
        assert buffer.asked[0].max_samples == 16 and buffer.asked[0].loaded_version == 1
        assert buffer.asked[0].run_file_hash == run.hash and buffer.holds == [1]
        for draw, submitted in buffer.submitted.items():
            if draw in (7, 8):
                assert "no such room" in submitted.failure if draw == 7 else "the floor gave way" in submitted.failure
                continue
            sample = buffer.sample(draw)
            assert submitted.score.scalar == len(submitted.score.per_turn or [1]) == 1 + draw % 3
            assert len(sample.segments) == 1 and {s.version for s in sample.segments[0].spans} == {1}
        assert len(buffer.submits) <= 8
        await buffer.until(lambda: buffer.beats)
        assert context.policy_version and context.policy_version.number == 1


async def test_an_engine_short_of_cache_is_given_less(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempting with four requests running and a full cache: the worker asks for no more than three from then on."""
    preemptions, bounded, plain = itertools.count(10), asyncio.Event(), RolloutWorker.bound
    monkeypatch.setattr(RolloutWorker, "bound", lambda self, slots: (plain(self, slots), slots == 3 and bounded.set()))
    monkeypatch.setattr(TorchEngine, "load", property(lambda self: Load(4, 3, 1.0, next(preemptions), 0)))
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    async with service(run, buffer) as context:
        await buffer.until(lambda: buffer.asked)
        assert buffer.asked[0].max_samples == 16
        await asyncio.wait_for(bounded.wait(), 20)
        await buffer.grant(1)
        await buffer.until(lambda: len(buffer.asked) > 1 and 1 in buffer.submitted)
        assert {asked.max_samples for asked in buffer.asked[1:]} <= {1, 2, 3}
        assert context.registry.get_sample_value("slipstream_rollout_kv_cache_share") == 1.0


async def test_seeds_decide_not_the_company(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """The same draw granted alone and among others gives the same tokens."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    async with service(run, buffer):
        await buffer.grant(2)
        await buffer.until(lambda: 2 in buffer.submitted)
        alone = buffer.sample(2).segments[0]
        buffer.submits.clear()
        await buffer.grant(*range(7))
        await buffer.until(lambda: len(buffer.submitted) == 7)
        again = buffer.sample(2).segments[0]
        assert again.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(again.logprobs, alone.logprobs, atol=1e-5)


async def test_a_lease_waits_for_its_step(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """min_step = 1: not started by step 0, but heartbeats keep it; the event of step 1 loads it and starts the sample."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    await buffer.grant(0)
    await buffer.grant(3, min_step=1)
    async with service(run, buffer):
        await buffer.until(lambda: 0 in buffer.submitted and {3} in buffer.beats)
        assert 3 not in buffer.submitted
        await published(run, buffer, 4, 1, seed=1)
        await buffer.until(lambda: 3 in buffer.submitted)
        assert [(s.version, s.step) for s in buffer.sample(3).segments[0].spans] == [(4, 1)]


async def test_pinned_samples_come_wholly_from_their_version(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """Leases of two versions in one grant, and later an older one again: each sample is generated by exactly its version."""
    run = turns(tmp_path, schedule={"mode": "pinned"})
    one, two = [await published(run, buffer, n, n - 1, seed=n) for n in (1, 2)]
    for draw in range(6):
        await buffer.grant(draw, pinned_version=(one, two)[draw % 2])
    async with service(run, buffer):
        await buffer.until(lambda: len(buffer.submitted) == 6)
        for draw in range(6):
            assert {s.version for s in buffer.sample(draw).segments[0].spans} == {1 + draw % 2}
        first = buffer.sample(0).segments[0]
        buffer.submits.clear()
        await buffer.grant(0, pinned_version=one)
        await buffer.until(lambda: 0 in buffer.submitted)
        again = buffer.sample(0).segments[0]
        assert again.logprobs.tobytes() == first.logprobs.tobytes(), "a re-grant repeats the sample bit for bit"


async def test_a_damaged_version_is_not_loaded(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """One flipped bit in a tensor: the old version serves on, and the next one is loaded."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    async with open_store(run.objects_url) as store:
        version = await publish(store, run, 2, 1, seed=1)
        path = "versions/00000002-1/model.safetensors"
        data = bytearray(await store.get(path))
        data[-1] ^= 1
        await store.put(path, bytes(data))
    async with service(run, buffer) as context:
        await buffer.until(lambda: buffer.asked)
        await buffer.announce(version)
        await buffer.until(lambda: 2 in buffer.holds)
        await buffer.grant(0)
        await buffer.until(lambda: 0 in buffer.submitted)
        assert [s.version for s in buffer.sample(0).segments[0].spans] == [1]
        await published(run, buffer, 3, 2, seed=2)
        await buffer.grant(3, min_step=2)
        await buffer.until(lambda: 3 in buffer.submitted)
        assert context.registry.get_sample_value("slipstream_rollout_swaps_total", {"outcome": "refused"}) >= 1


async def test_a_fenced_lease_is_dropped(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """The heartbeat says that another attempt exists: the sample is not submitted and its place is free again."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    buffer.fenced = {3}
    await buffer.grant(3, min_step=1)
    async with service(run, buffer):
        await buffer.until(lambda: {3} in buffer.beats)
        await published(run, buffer, 2, 1)
        await buffer.grant(0, min_step=1)
        await buffer.until(lambda: 0 in buffer.submitted)
    assert 3 not in buffer.submitted and not buffer.released


async def test_what_the_buffer_cannot_take_now_is_kept(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """RESOURCE_EXHAUSTED: the same bytes again after the delay. A malformed sample is closed with the reason, once."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    tries: dict[int, list[bytes]] = {}

    def answer(sample: samples_pb2.SubmittedSample) -> Exception | None:
        draw = sample.lease.sample.draw.number
        bodies = tries.setdefault(draw, [])
        bodies.append(sample.body)
        if draw == 0 and len(bodies) == 1:
            return Exhausted("no room", retry_s=0.05)
        return InvalidInput("bad", "NON_FINITE_LOGPROB") if draw == 3 and not sample.failure else None

    buffer.answer = answer
    await buffer.grant(0, 3)
    async with service(run, buffer):
        await buffer.until(lambda: len(tries.get(0, ())) == 2 and len(tries.get(3, ())) == 2)
        assert tries[0][0] == tries[0][1] and buffer.submitted[3].failure == "malformed: NON_FINITE_LOGPROB"


async def test_drain_finishes_or_hands_back(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """No grace: answers in flight come back as partials with their lease, held leases plainly; then nothing more is asked."""
    run = turns(tmp_path, rollout={"context": 2048, "max_new_tokens": 2000, "slots": 4}, buffer={"quota_bytes": 1 << 32})
    await published(run, buffer, 1, 0)
    await buffer.grant(0, index=0)
    await buffer.grant(3, min_step=5)
    async with service(run, buffer) as context, rpc.channel(context.address) as channel:
        await buffer.until(lambda: any({0, 3} <= beat for beat in buffer.beats))
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        drained = await stub.Drain(rollout_pb2.DrainRequest(grace=rpc.duration(0)))
        asked = len(buffer.asked)
        assert (drained.finished, drained.handed_back) in ((0, 2), (1, 1)) and buffer.released == [3]
        if drained.handed_back == 2:
            [partial] = buffer.partials
            segment = decode(partial.body).segments[0]
            assert partial.release and 0 < len(segment.logprobs) < 2000
        await buffer.grant(6)
        assert (await stub.Drain(rollout_pb2.DrainRequest())).handed_back == 0 and len(buffer.asked) == asked


async def test_large_routes_go_to_the_object_store(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit a sample carries a reference; the bytes there are [T-1, L, K] of the segment."""
    monkeypatch.setattr("services.rollout.player.INLINE_ROUTES_BYTES", 30)
    run = turns(tmp_path, rollout={"capture_routes": True})
    await published(run, buffer, 1, 0)
    await buffer.grant(0, 3)
    async with service(run, buffer) as context:
        await buffer.until(lambda: len(buffer.submitted) == 2)
        for draw in (0, 3):
            segment = buffer.sample(draw).segments[0]
            if segment.routes_ref is None:
                assert segment.routes is not None and segment.routes.nbytes <= 30
                continue
            data = await context.store.get(segment.routes_ref.object.key)
            assert list(segment.routes_ref.shape) == [len(segment.tokens) - 1, 2, 2]
            assert len(data) == segment.routes_ref.object.size
        assert any(buffer.sample(d).segments[0].routes_ref is not None for d in (0, 3))


async def ask(context: ServiceContext, **fields: Any) -> list[rollout_pb2.GenerateResponse]:
    request = rollout_pb2.GenerateRequest(**{
        "prompt": tensor(np.array([3, 4, 12], np.int32)), "max_new_tokens": 6, "temperature": 1.0, "seed": 5, **fields})
    async with rpc.channel(context.address) as channel:
        try:
            return [r async for r in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request)]
        except Exception as error:
            raise from_rpc_error(error) from None  # pyright: ignore[reportArgumentType]


async def test_generate_streams_tokens(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """Token in, token out: pieces with log-probabilities and spans, the finish reason last; bad input by its reason."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    async with service(run, buffer) as context:
        await buffer.until(lambda: buffer.asked)
        pieces = await ask(context)
        tokens = [t for p in pieces for t in array(p.tokens).tolist()]
        assert len(tokens) == 6 and sum(v.length for p in pieces for v in p.versions) == 6
        assert pieces[-1].finish_reason == FINISH_LENGTH and not any(p.finish_reason for p in pieces[:-1])
        for reason, fields in (
            ("EMPTY_PROMPT", {"prompt": tensor(np.zeros(0, np.int32))}), ("TEMPERATURE", {"temperature": 0.0}),
            ("PROMPT_TOO_LONG", {"prompt": tensor(np.full(64, 3, np.int32))}), ("ROUTES", {"return_routes": True}),
        ):
            with pytest.raises(InvalidInput) as caught:
                await ask(context, **fields)
            assert caught.value.reason == reason


async def test_no_version_yet(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """Before the first version: status names the wait, Generate is Unavailable, nothing is leased."""
    async with service(turns(tmp_path), buffer) as context:
        with pytest.raises(Exception, match="no policy version"):
            await ask(context)
        await buffer.until(lambda: buffer.lists)
        with pytest.raises(Exception, match="no policy version"):
            await ask(context)
        assert context.waits.current and context.waits.current[0] == "first policy version from the trainer"
        assert not buffer.asked
