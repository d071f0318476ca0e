"""The rollout service against a buffer that a test scripts: leases, versions, submits, heartbeats, drains; over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.concurrency import Drafts, Load
from services.rollout.torch_engine import TorchEngine
from services.rollout.worker import RolloutWorker
from slipstream import rpc
from slipstream.errors import Exhausted, InvalidInput, from_rpc_error
from slipstream.objects import open_store
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.protos.types.v1 import policy_pb2 as types_policy_pb2
from slipstream.sample import FINISH_LENGTH, array, decode, tensor
from slipstream.service import ServiceContext
from tests.rollout_runs import publish
from tests.scripted_buffer import ScriptedBuffer, published, service, slow_store, turns

Version = types_policy_pb2.PolicyVersion


@pytest.fixture
def buffer() -> ScriptedBuffer:
    return ScriptedBuffer()


async def test_leases_become_samples(tmp_path: Path, buffer: ScriptedBuffer) -> None:
    """Many leases are played together, over one to three turns, and submitted in few calls; failures of tasks are data."""
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    await buffer.grant(*range(12))
    async with service(run, buffer) as context:
        await buffer.until(lambda: len(buffer.submitted) == 12)
        assert buffer.asked[0].max_samples == 16 and buffer.asked[0].loaded_version == 1
        assert buffer.asked[0].run_file_hash == run.hash
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


def short_of_cache(monkeypatch: pytest.MonkeyPatch, bound: int) -> asyncio.Event:
    """Engines run four requests with a full cache, three wait, and each look finds preemptions; set once the bound is this."""
    preemptions, bounded, plain = itertools.count(10), asyncio.Event(), RolloutWorker.bound
    monkeypatch.setattr(RolloutWorker, "bound", lambda self, slots: (plain(self, slots), slots == bound and bounded.set()))
    drafts = Drafts(5, 20, 7)
    monkeypatch.setattr(TorchEngine, "load", property(lambda self: Load(4, 3, 1.0, next(preemptions), 0, drafts=drafts)))
    return bounded


async def test_an_engine_short_of_cache_is_given_less(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempting with four requests running and a full cache: the worker asks for no more than four from then on."""
    bounded, run = short_of_cache(monkeypatch, 4), turns(tmp_path)
    await published(run, buffer, 1, 0)
    async with service(run, buffer) as context:
        await buffer.until(lambda: buffer.asked)
        assert buffer.asked[0].max_samples == 16
        await asyncio.wait_for(bounded.wait(), 20)
        await buffer.grant(1)
        await buffer.until(lambda: len(buffer.asked) > 1 and 1 in buffer.submitted)
        assert {asked.max_samples for asked in buffer.asked[1:]} <= {1, 2, 3, 4}
        assert context.registry.get_sample_value("slipstream_rollout_kv_cache_share") == 1.0
        guesses = ("drafts_total", "draft_tokens_total", "accepted_tokens_total")  # sums: once, however often it looked
        assert [context.registry.get_sample_value(f"slipstream_rollout_{name}") for name in guesses] == [5, 20, 7]


async def test_samples_that_are_not_with_the_engine_are_in_hand_as_well(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same engine, but it also holds samples that wait for a version: fourteen for seven, so eight may be."""
    bounded, run = short_of_cache(monkeypatch, 8), turns(tmp_path)
    await published(run, buffer, 1, 0)
    await buffer.grant(*range(10, 24), min_step=1)
    async with service(run, buffer):
        await asyncio.wait_for(bounded.wait(), 20)


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


async def test_slots_are_filled_in_lots(tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease costs every service on the way a call, and the engine a pass: while samples are in flight, a worker asks for more
    only once an eighth of its slots is free. What keeps it is time: a slot alone is filled a little later."""
    monkeypatch.setattr("services.rollout.worker.GATHER_S", 30.0)
    run = turns(tmp_path, rollout={"context": 2048, "max_new_tokens": 2000, "slots": 16}, buffer={"quota_bytes": 1 << 32})
    await published(run, buffer, 1, 0)
    await buffer.grant(*range(0, 45, 3))
    async with service(run, buffer):
        await buffer.until(lambda: buffer.asked)
        assert buffer.asked[0].max_samples == 16
        await buffer.until(lambda: len(buffer.submitted) >= 2)
        assert all(asked.max_samples >= 2 for asked in buffer.asked[1:])


async def test_a_version_that_takes_a_while_is_held(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is slow: the buffer is asked to keep the version, once, while it is read."""
    slow_store(monkeypatch, buffer)
    run = turns(tmp_path)
    await published(run, buffer, 1, 0)
    await buffer.grant(0)
    async with service(run, buffer):
        await buffer.until(lambda: 0 in buffer.submitted)
        assert buffer.holds == [1]


async def test_a_damaged_version_is_not_loaded(
    tmp_path: Path, buffer: ScriptedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One flipped bit in a tensor: the old version serves on, and the next one is loaded."""
    slow_store(monkeypatch, buffer)
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
