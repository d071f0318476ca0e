"""A trainer that was stopped past its successor's start and then goes on: wherever it was, it has no effect, and it ends with
an error that says why.

Both trainers are whole `TrainerLoop`s on one real buffer, one Redis and one object store. The first is held at a write of the
object store: to everybody else that is what SIGSTOP looks like, at a known place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.trainer.loop import TrainerLoop
from slipstream import sample
from slipstream.batch_log import numbers, read_header
from slipstream.config import RunFile
from slipstream.errors import Fenced, SlipstreamError
from slipstream.lifecycle import EXIT_FENCED, Lifecycle, SystemClock
from slipstream.objects import FileStore
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.service import open_context
from slipstream.service_command import ServiceArguments
from tests.buffer_client import Client, buffer
from tests.redis_server import RedisProcess
from tests.trainer_samples import run_file, segment

STEPS = 4


class Stop:
    """Everything that one trainer does to the outside passes here: once it is held, all of it stands still until `go`."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self.held, self.go = asyncio.Event(), asyncio.Event()

    async def pass_through(self, key: str = "") -> None:
        if key and not self.held.is_set() and self._holds(key):
            self.held.set()
        if self.held.is_set():
            await self.go.wait()


class HeldStore:
    """The object store as this trainer has it: its writes may be where it stops."""

    def __init__(self, store: Any, stop: Stop) -> None:
        self._store, self._stop = store, stop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(key: str = "", *arguments: Any, **named: Any) -> Any:
            await self._stop.pass_through(key if name in ("put", "put_if_absent", "replace") else "")
            return await method(key, *arguments, **named)
        return call


class HeldChannel:
    """The way to the buffer as this trainer has it: neither calls nor answers pass while it is stopped."""

    def __init__(self, channel: Any, stop: Stop) -> None:
        self._channel, self._stop = channel, stop

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        method = self._channel.unary_unary(*arguments, **named)

        async def call(*arguments: Any, **named: Any) -> Any:
            await self._stop.pass_through()
            try:
                return await method(*arguments, **named)
            finally:
                await self._stop.pass_through()
        return call

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        method = self._channel.unary_stream(*arguments, **named)

        async def call(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
            await self._stop.pass_through()
            async for reply in method(*arguments, **named):
                await self._stop.pass_through()
                yield reply
        return call

    async def close(self, *arguments: Any) -> None:
        await self._channel.close(*arguments)


class Trainer:
    """One trainer start in this process; await its exit `code`."""

    def __init__(self, run: RunFile, address: str, holds: Callable[[str], bool] = lambda key: False) -> None:
        self.lifecycle = Lifecycle(SystemClock(), stage_timeout_s=20)
        self.stop = Stop(holds)
        self.loop: TrainerLoop
        self.code = asyncio.create_task(self._run(ServiceArguments(run, "trainer", "trainer-0", address)))

    async def _run(self, arguments: ServiceArguments) -> int:
        async with open_context(arguments, self.lifecycle, self.lifecycle.clock) as context:
            context.store = HeldStore(context.store, self.stop)  # type: ignore[assignment]
            context._channel = HeldChannel(context.channel, self.stop)  # type: ignore[assignment]
            self.loop = TrainerLoop(context)
            self.lifecycle.spawn("trainer loop", self.loop.run(), endless=False)
            return await self.lifecycle.run()


async def work(client: Client) -> None:
    """All rollout workers: whatever is leased is answered with tokens of the newest version, and its reward."""
    assert client.front is not None
    while True:
        if not (leases := (await client.lease(wait_s=1)).leases):
            continue
        await client.front.refresh_versions(force=True)
        newest = client.front.newest
        assert newest is not None and newest.step >= max(lease.min_step for lease in leases)
        submits = []
        for lease in leases:
            draw, index = lease.lease.sample.draw.number, lease.lease.sample.index
            played = segment([2 + draw % 10, 12], [2 + index, 1], step=newest.step)
            played.spans = (sample.Span(newest.number, newest.step, newest.incarnation, 2),)
            body = sample.encode(sample.Sample([played]))
            submits.append(samples_pb2.SubmittedSample(
                lease=lease.lease, body=body, crc32c=sample.crc32c(body), tokens=4, generated_tokens=2,
                oldest_step=newest.step, newest_step=newest.step, score=sample_pb2.Score(scalar=index % 2)))
        await client.submit(*submits)


@contextlib.asynccontextmanager
async def working_buffer(redis: RedisProcess, folder: Path, run: RunFile) -> AsyncIterator[Client]:
    async with buffer(redis, folder / "objects", run, tasks=0) as client:
        worker = asyncio.create_task(work(client))
        yield client
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError, SlipstreamError):
            await worker


def run_of(folder: Path, objects: Path, **sections: Any) -> RunFile:
    return run_file(
        str(folder), run={"steps": STEPS}, schedule={"groups_per_batch": 2, "group_size": 2, "max_lag": 1},
        objects={"url": f"file://{objects}", "keep_versions": 100}, **sections)


# Where the first trainer stands still: before the n-th write of this kind (its start makes some itself).
PLACES = {
    "publication, before the tensors": ("versions/", ".safetensors", 3),
    "publication, before the manifest": ("versions/", "manifest.json", 3),
    "checkpoint, before its last shard": ("checkpoints/", ".safetensors", 6),
    "checkpoint, before the manifest": ("checkpoints/", "manifest.json", 2),
    "checkpoint, before the pointer": ("checkpoints/", "latest", 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_a_stopped_trainer_goes_on_too_late(place: str, redis: RedisProcess, tmp_path: Path) -> None:
    """A stops in the middle of step 2's publication or checkpoint; B takes over and trains to the end; then A goes on. It exits
    with the code of fenced processes, and pointer, versions, commits and batches are B's."""
    start, end, count = PLACES[place]
    seen: list[str] = []

    def holds(key: str) -> bool:
        matches = key.startswith(start) and key.endswith(end)
        seen.extend([key] * matches)
        return matches and len(seen) == count

    run = run_of(tmp_path / "a", tmp_path / "objects")
    async with working_buffer(redis, tmp_path, run) as client:
        a = Trainer(run, client.address, holds)
        await asyncio.wait({a.code, held := asyncio.create_task(a.stop.held.wait())}, return_when=asyncio.FIRST_COMPLETED)
        assert held.done(), f"it did not come to that place: {seen}"
        b = Trainer(run_of(tmp_path / "b", tmp_path / "objects"), client.address)
        assert await b.code == 0
        before = await effects(client, tmp_path / "objects")
        assert before[2]["committed"] == STEPS
        a.stop.go.set()
        assert await a.code == EXIT_FENCED
        assert isinstance(a.lifecycle.error, Fenced) and a.lifecycle.error.reason == "FENCED"
        assert await effects(client, tmp_path / "objects") == before
    trained = [json.loads(line) for line in (tmp_path / "b" / "audit" / "trainer.jsonl").read_text().splitlines()]
    assert trained[-1]["batch"] == STEPS and {entry["incarnation"] for entry in trained} == {2}


async def effects(client: Client, objects: Path) -> Any:
    """What a trainer can change for others: the pointer, the versions that may be loaded, the ledger's counters, the log."""
    assert client.front is not None
    store = FileStore(objects)
    meta = (await client.front.ledger.balance()).meta
    return (
        await store.get("checkpoints/latest"), await client.front.ledger.versions(),
        {name: meta[name] for name in ("published", "numbered", "committed", "incarnation", "version")},
        [await read_header(store, number) for number in await numbers(store)])
