"""StreamSamples: many samples over one stream. What a broken one left unanswered is handed in again; nothing is lost by that,
and nothing is there twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2

from benchmarks.faults.proxy import Http2Answers, Proxy
from services.buffer.frames import answered
from slipstream import auth_credentials, rpc, sample, sample_stream
from slipstream.errors import Fenced, InvalidInput, SlipstreamError, Unavailable
from slipstream.lifecycle import SystemClock, Waits
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.sample_stream import Handed
from tests.buffer_client import Client, buffer, run_file
from tests.redis_server import RedisProcess

TOKENS = 20_000  # 160 KB a body: six in a frame
GROUPS, SIZE = 8, 4


@pytest.fixture(autouse=True)
def frames_of_a_megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_stream, "FRAME_BYTES", 1 << 20)


def finished(lease: samples_pb2.SampleLease, tokens: int = TOKENS) -> Handed:
    """What a worker hands in, with its reward; no two bodies are alike."""
    rng = np.random.default_rng(lease.seed)
    segment = sample.Segment(
        rng.integers(0, 1000, tokens, dtype=np.int32), np.arange(tokens) >= 1, -rng.random(tokens - 1, np.float32),
        (sample.Span(1, 0, 1, tokens - 1),))
    body = sample.encode(sample.Sample([segment]))
    header = samples_pb2.SubmittedSample(
        lease=lease.lease, crc32c=sample.crc32c(body), tokens=tokens, generated_tokens=tokens - 1)
    header.score.scalar = 1.0 + lease.lease.sample.index
    return Handed(header, body)


def run_of_large(**more: Any) -> Any:
    return run_file(groups_per_batch=GROUPS, group_size=SIZE, **more)


async def work(client: Client) -> list[Handed]:
    """A whole batch of finished samples: five megabytes."""
    await client.begin()
    return [finished(lease) for lease in (await client.lease(GROUPS * SIZE)).leases]


async def hand_in(address: str, samples: Sequence[Handed]) -> list[samples_pb2.SubmitResult]:
    async with rpc.channel(address) as channel:
        return await sample_stream.submit_until(
            sample_stream.method(channel), "rollout-0", samples, 20, Waits(SystemClock()), "buffer", SystemClock())


async def assert_all_there(client: Client, samples: Sequence[Handed]) -> None:
    """Batch 1 has exactly these bodies, and the ledger adds up."""
    assert client.front is not None
    balance = await client.front.ledger.balance()
    balance.check(SIZE)
    assert balance.samples["scored"] == len(samples)
    assert (await client.batch(1)).HasField("batch")
    assert await client.read(1) == {(s.lease.sample.draw.number, s.lease.sample.index): body for s, body in samples}


def test_a_frame_is_the_message_that_the_contract_says() -> None:
    """Written field by field, read by protobuf: nothing is missing, and no frame is larger than it has to be."""
    leases = [samples_pb2.SampleLease(seed=n) for n in range(9)]
    for n, lease in enumerate(leases):
        lease.lease.sample.draw.number = n
    samples = [*(finished(lease) for lease in leases[:8]), Handed(samples_pb2.SubmittedSample(failure="gone"), b"")]
    found = []
    for count, data in sample_stream.frames("rollout-7", samples):
        message = samples_pb2.StreamSamplesRequest.FromString(data)
        assert (message.worker, len(message.samples)) == ("rollout-7", count)
        assert len(data) <= sample_stream.FRAME_BYTES + 100
        found += message.samples
    assert [sample_stream.apart(one) for one in found] == samples
    assert len(list(sample_stream.frames("w", samples))) == 2
    assert list(sample_stream.frames("w", [])) == []


async def test_a_stream_stores_what_it_carries_and_answers_in_order(redis: RedisProcess, tmp_path: Path) -> None:
    """One damaged body among the others is refused by itself; its correction and a repeat of all the others are taken."""
    async with buffer(redis, tmp_path / "objects", run_of_large()) as client:
        samples = await work(client)
        damaged = [*samples]
        damaged[9] = Handed(samples[9].sample, samples[9].body[:-1] + b"\0")
        codes = [r.status.code for r in await hand_in(client.address, damaged)]
        assert codes == [code_pb2.INVALID_ARGUMENT if n == 9 else code_pb2.OK for n in range(len(samples))]
        results = await hand_in(client.address, samples)
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_ACCEPTED] * len(samples)
        await assert_all_there(client, samples)


class Heard:
    """A call whose answers are noticed."""

    def __init__(self, call: Any, heard: asyncio.Event) -> None:
        self._call, self._heard = call, heard
        self.cancel = call.cancel

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for answer in self._call:
            self._heard.set()
            yield answer


@pytest.mark.parametrize("fault", ["reset", "lost answer"])
async def test_a_stream_that_breaks_loses_nothing_and_doubles_nothing(
        redis: RedisProcess, tmp_path: Path, fault: str) -> None:
    """Reset in its middle, or with an answer lost although its samples are stored: the rest goes into another one."""
    async with buffer(redis, tmp_path / "objects", run_of_large()) as client:
        samples = await work(client)
        proxy = Proxy("stream", lambda: client.address, Http2Answers)
        address, streams, heard = await proxy.listen(), [], asyncio.Event()
        async with rpc.channel(address) as channel:
            begin = sample_stream.method(channel)

            def stream(requests: AsyncIterator[bytes], timeout: float) -> Any:
                streams.append(0)
                return Heard(begin(counted(requests), timeout=timeout), heard)

            async def counted(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
                async for frame in requests:
                    streams[-1] += 1
                    if len(streams) == 1 and streams[-1] == 4:
                        await heard.wait()  # some frames are answered, others are not
                        await (broken() if fault == "reset" else proxy.lose_reply())
                    yield frame

            async def broken() -> None:
                assert proxy.reset()

            results = await sample_stream.submit_until(
                stream, "rollout-0", samples, 20, Waits(SystemClock()), "buffer", SystemClock())
        await proxy.close()
        assert len(streams) > 1
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_ACCEPTED] * len(samples)
        await assert_all_there(client, samples)


async def test_bytes_that_are_no_frame_end_the_stream(redis: RedisProcess, tmp_path: Path) -> None:
    """With INVALID_ARGUMENT, after what came before was answered."""
    async with buffer(redis, tmp_path / "objects", run_of_large()) as client:
        samples = await work(client)
        (_, good), *_ = sample_stream.frames("rollout-0", samples)

        async def requests() -> AsyncIterator[bytes]:
            for frame in (good, b"\xff" * 100, good):
                yield frame

        async with rpc.channel(client.address) as channel:
            answers = sample_stream.method(channel)(requests(), timeout=10)
            assert len((await answers.read()).results) == 6
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_another_role_cannot_open_a_stream(tmp_path: Path) -> None:
    """And its frames are not read; for the right role, a quota counts every frame."""
    read: list[bytes] = []

    class Servicer:
        async def stream(self, requests: AsyncIterator[bytes], context: Any) -> Any:
            async for frame in requests:
                read.append(frame)
                yield samples_pb2.StreamSamplesResponse(results=[samples_pb2.SubmitResult()])

    def add(servicer: Servicer, server: Any) -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.stream, None, samples_pb2.StreamSamplesResponse.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "slipstream.buffer.v1.SampleService", {"StreamSamples": handler}),))

    secret = b"0123456789abcdef0123456789abcdef"
    own = dataclasses.replace(auth_credentials.fixed(secret, "buffer"), own_calls_per_minute=2)
    one = [Handed(samples_pb2.SubmittedSample(), b"x" * sample_stream.FRAME_BYTES)]
    async with rpc.Server("127.0.0.1", 0, [(add, Servicer())], credentials=own, grace_s=0.1) as server:
        async with rpc.channel(server.address, "reward", secret) as channel:
            with pytest.raises(SlipstreamError) as refused:
                async for _ in sample_stream.submit(sample_stream.method(channel), "w", one, 5):
                    pass
            assert (refused.value.reason, read) == ("ROLE", [])
        async with rpc.channel(server.address, "rollout", secret) as channel:
            count = 0
            with pytest.raises(SlipstreamError) as refused:
                async for _ in sample_stream.submit(sample_stream.method(channel), "w", one * 3, 5):
                    count += 1
            assert (refused.value.reason, count, len(read)) == ("QUOTA", 2, 2)


class Gate:
    """Handles frames one by one, when a test says so."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.let_go: list[bytes] = []
        self.waiting: dict[bytes, asyncio.Future[str]] = {}

    async def handle(self, frame: bytes) -> str:
        self.begun.append(frame)
        future = self.waiting[frame] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.let_go.append(frame)
            raise


async def given(*frames: bytes) -> AsyncIterator[bytes]:
    for frame in frames:
        yield frame


async def turns(condition: Callable[[], object] = lambda: False) -> None:
    """Let the loop turn until then, or a few times."""
    for _ in range(50):
        if condition():
            return
        await asyncio.sleep(0)


async def test_frames_are_held_back_while_too_many_bytes_are_unanswered() -> None:
    """Of four frames of 10 bytes with room for 15, two are taken; the others after the first answer. Answers are in order."""
    gate, got = Gate(), []

    async def collect() -> None:
        async for answer in answered(given(*(bytes([n]) * 10 for n in range(4))), gate.handle, most_bytes=15):
            got.append(answer)

    task = asyncio.create_task(collect())
    await turns(lambda: len(gate.begun) == 2)
    await turns()
    assert len(gate.begun) == 2
    gate.waiting[b"\1" * 10].set_result("second")
    await turns()
    assert (len(gate.begun), got) == (2, [])
    gate.waiting[b"\0" * 10].set_result("first")
    await turns(lambda: len(gate.begun) == 4)
    assert got == ["first", "second"]
    for frame, answer in ((b"\2" * 10, "third"), (b"\3" * 10, "fourth")):
        gate.waiting[frame].set_result(answer)
    await task
    assert got == ["first", "second", "third", "fourth"]


async def test_an_error_ends_the_stream_after_the_answers_before_it() -> None:
    """What comes after it is let go: the caller hands it in again."""
    gate, got = Gate(), []

    async def collect() -> None:
        async for answer in answered(given(b"a", b"b", b"c"), gate.handle):
            got.append(answer)

    task = asyncio.create_task(collect())
    await turns(lambda: len(gate.begun) == 3)
    gate.waiting[b"b"].set_exception(Unavailable("Redis is away", "REDIS"))
    gate.waiting[b"a"].set_result("a")
    with pytest.raises(Unavailable):
        await task
    assert (got, gate.let_go) == (["a"], [b"c"])


async def test_what_ends_the_frames_ends_the_answers() -> None:
    """A refusal while reading, as of a quota, is the stream's error."""
    async def refused() -> AsyncIterator[bytes]:
        yield b"a"
        raise Fenced("no more", "ENOUGH")

    async def handle(frame: bytes) -> bytes:
        return frame

    got = []
    with pytest.raises(Fenced):
        async for answer in answered(refused(), handle):
            got.append(answer)
    assert got == [b"a"]


async def test_a_wrong_number_of_answers_is_an_error() -> None:
    """A result that belongs to nobody would acknowledge a sample that was not stored."""
    class Answers:
        def __init__(self, counts: Sequence[int]) -> None:
            self.counts = counts

        def __call__(self, requests: AsyncIterator[bytes], timeout: float) -> Any:
            async def all_of_it() -> AsyncIterator[samples_pb2.StreamSamplesResponse]:
                frames = [frame async for frame in requests]
                assert len(frames) == 2
                for count in self.counts:
                    yield samples_pb2.StreamSamplesResponse(results=[samples_pb2.SubmitResult()] * count)

            class Call:
                def __aiter__(self) -> Any:
                    return messages

                def cancel(self) -> None:
                    pass

            messages = all_of_it()
            return Call()

    samples = [Handed(samples_pb2.SubmittedSample(), b"x" * 700_000)] * 2
    for counts in ([1], [1, 2], [1, 1, 1]):
        with pytest.raises(SlipstreamError) as wrong:
            async for _ in sample_stream.submit(Answers(counts), "w", samples, 5):
                pass
        assert wrong.value.reason == "FRAMES" and not isinstance(wrong.value, InvalidInput)
    assert sum([len(r) async for r in sample_stream.submit(Answers([1, 1]), "w", samples, 5)]) == 2
