"""Bytes of a version come from the nearest place that has them right: the node's folder, the weight server, the store."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.rollout import node_cache, weight_client
from services.rollout.near import Near
from services.rollout.node_cache import NodeCache
from services.rollout.weight_client import WeightClient
from services.weights.memory import RangeMemory
from services.weights.service import WeightServicer, add_weight_service
from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.errors import ConfigError, Exhausted, InvalidInput, NotFound, Unavailable
from slipstream.lifecycle import SystemClock
from slipstream.manifest import Held, RawTensor, read_manifest, read_tensors, write_version
from slipstream.objects import FileStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.ranges import Range, Span, checksum
from slipstream.telemetry import RolloutMetrics, WeightServerMetrics
from tests.unit.test_version_patches import _weights as patched_weights

BIG = 3 << 20  # bytes of the largest tensor: several messages


class CountingStore(FileStore):
    """Remembers what was read, and can be made to fail or to wait."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.read)

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        await self.gate.wait()
        data = await super().get(key, offset, size)
        self.read.append((key, len(data)))
        return data


def tensors(seed: int = 0) -> list[RawTensor]:
    chance = random.Random(seed)
    return [
        RawTensor("experts", "F32", (BIG // 4,), chance.randbytes(BIG)), RawTensor("norm", "F32", (8,), chance.randbytes(32)),
        RawTensor("empty", "F32", (0,), b"")]


async def written(store: FileStore, number: int = 1) -> PolicyVersion:
    return await write_version(
        store, run="test", number=number, step=number, incarnation=1, tensors=tensors(number), files={})


async def read(source: Any, version: PolicyVersion) -> dict[str, bytes]:
    manifest = await read_manifest(source, version, "test")
    return {t.name: bytes(t.data) for t in await read_tensors(source, manifest)}


EXPECTED = {t.name: bytes(t.data) for t in tensors(1)}


class Worker:
    """A reader with its metrics."""

    def __init__(self, store: FileStore, cache: NodeCache | None = None, server: str = "") -> None:
        self.metrics = RolloutMetrics(CollectorRegistry())
        client = WeightClient(server, Credentials(), SystemClock()) if server else None
        self.source = Near(store, cache, client, self.metrics)

    def counted(self, place: str) -> dict[str, int]:
        """Ranges by outcome."""
        return {
            s.labels["outcome"]: int(s.value) for m in self.metrics.weight_reads.collect() for s in m.samples
            if s.name.endswith("_total") and s.labels["place"] == place}


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "objects")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


# the node's folder


async def test_workers_of_a_node_read_the_store_once(store: CountingStore, folder: Path) -> None:
    """Four at once: one fetches each range, the others wait for it and read the folder. Later ones ask the store nothing."""
    version = await written(store)
    workers = [Worker(store, NodeCache(folder, 1 << 30)) for _ in range(4)]
    assert await asyncio.gather(*(read(w.source, version) for w in workers)) == [EXPECTED] * 4
    once = list(store.read)
    assert len({key for key, _ in once}) == 2 and sum(size for _, size in once) < 1.1 * BIG
    assert await read(Worker(store, NodeCache(folder, 1 << 30)).source, version) == EXPECTED
    assert store.read == once
    assert sum(w.counted("store").get("hit", 0) for w in workers) == len(once)


@pytest.mark.parametrize("spoil", ["flip", "cut", "grow", "empty"])
async def test_a_damaged_file_is_found_counted_and_replaced(store: CountingStore, folder: Path, spoil: str) -> None:
    """What a crash or a bad disk leaves is not believed: the store is asked, and the file is whole again."""
    version = await written(store)
    await read(Worker(store, NodeCache(folder, 1 << 30)).source, version)
    path = max(files(folder), key=lambda p: p.stat().st_size)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    path.write_bytes({"flip": bytes(bad), "cut": good[:-1], "grow": good + b"x", "empty": b""}[spoil])
    worker = Worker(store, NodeCache(folder, 1 << 30))
    assert await read(worker.source, version) == EXPECTED
    assert worker.counted("node")["damaged"] == 1 and worker.counted("store") == {"hit": 1}
    assert path.read_bytes() == good


async def test_a_patch_is_checked_where_it_is_read(store: CountingStore, folder: Path) -> None:
    """The manifest has a checksum of the patch itself, so a damaged one costs a read of the store and not the version. One
    that was written without is read from the store alone."""
    first = await write_version(store, run="test", number=1, step=0, incarnation=1, tensors=patched_weights(0), files={})
    second = await write_version(
        store, run="test", number=2, step=1, incarnation=1, tensors=patched_weights(1), files={},
        parent=Held(first, patched_weights(0), 1))
    expected = {t.name: bytes(t.data) for t in patched_weights(1)}
    assert await read(Worker(store, NodeCache(folder, 1 << 30)).source, second) == expected
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    worker = Worker(store, NodeCache(folder, 1 << 30))
    assert await read(worker.source, second) == expected and worker.counted("node")["damaged"] == 4
    manifest = await read_manifest(store, second)
    assert [t.stored_crc32c is None for t in manifest.tensors] == [not t.patched for t in manifest.tensors]


async def test_the_folder_stays_within_its_bound(tmp_path: Path, folder: Path) -> None:
    """What was used longest ago goes; what was read just now stays; what does not fit at all is not kept."""
    cache = NodeCache(folder, 100)
    for n in range(4):
        await cache.put(f"a{n}", bytes([n]) * 30)
        os.utime(folder / f"a{n}", (n, n)) if (folder / f"a{n}").exists() else None
    assert await cache.get("a0") is None
    assert await cache.get("a1") == bytes([1]) * 30  # used: a2 is the oldest now
    await cache.put("b", bytes(30))
    assert [p.name for p in files(folder)] == ["a1", "a3", "b"]
    await cache.put("c", bytes(101))
    assert await cache.get("c") is None and sum(p.stat().st_size for p in files(folder)) <= 100


async def test_what_a_killed_writer_left_is_removed(folder: Path) -> None:
    """A temp file found under the folder's lock has no writer any more; it never looks like a range."""
    cache = NodeCache(folder, 1 << 20)
    orphan = folder / f"{node_cache.TEMP}99-abc"
    orphan.write_bytes(b"half")
    await cache.put("a", b"x")
    assert not orphan.exists() and await cache.get("a") == b"x"


async def test_the_turn_of_a_killed_process_is_over(folder: Path) -> None:
    """A worker that dies while it fetches keeps nobody waiting: the kernel lets go of its lock."""
    cache = NodeCache(folder, 1 << 20)
    code = (
        f"import fcntl; f = open({str(folder / '.turn-ab')!r}, 'ab'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); "
        "input()")
    holder = subprocess.Popen(  # noqa: ASYNC220 - its first line is all that is waited for
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    entered = asyncio.Event()

    async def enter() -> None:
        async with cache.turn("abc"):
            entered.set()

    async with cache.turn("cd"):  # another range's turn is free
        waiting = asyncio.create_task(enter())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(entered.wait()), 0.05)
    holder.kill()
    await asyncio.wait_for(waiting, 10)
    holder.communicate()


async def test_a_folder_that_fails_costs_nothing_but_its_use(
    store: CountingStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, and one that cannot be read: counted, and the store serves."""
    version, cache = await written(store), NodeCache(folder, 1 << 30)

    def full(size: int) -> None:
        raise OSError(28, "No space left on device")

    def broken(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(cache, "_make_room", full)
    worker = Worker(store, cache)
    assert await read(worker.source, version) == EXPECTED and worker.counted("node")["failed"] == 2
    monkeypatch.setattr(Path, "read_bytes", broken)
    assert await read(worker.source, version) == EXPECTED and worker.counted("node")["failed"] > 4


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    """Checksums tell accidents apart, not intentions: who writes there chooses what is sampled with."""
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        NodeCache(folder, 1)
    (folder.parent / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        NodeCache(folder.parent / "file", 1)


# the weight server


class Serving:
    """A weight server in this process, over real gRPC."""

    def __init__(self, store: FileStore, most_bytes: int = 1 << 30) -> None:
        self.metrics = WeightServerMetrics(CollectorRegistry())
        self.memory = RangeMemory(store, most_bytes, self.metrics)
        self.server = rpc.Server("127.0.0.1", 0, [(add_weight_service, WeightServicer(self.memory, self.metrics))], grace_s=0)

    def count(self, outcome: str) -> int:
        return int(self.metrics.reads.labels(outcome)._value.get())

    async def __aenter__(self) -> Serving:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop()
        await self.memory.close()


@pytest.fixture
async def serving(store: CountingStore) -> AsyncIterator[Serving]:
    async with Serving(store) as serving:
        yield serving


async def test_readers_of_many_nodes_cost_one_read(store: CountingStore, serving: Serving) -> None:
    """Four nodes ask at once: the server reads each range once, for all; what it sends is exact."""
    version = await written(store)
    store.gate.clear()
    workers = [Worker(store, server=serving.server.address) for _ in range(4)]
    reading = [asyncio.create_task(read(w.source, version)) for w in workers]
    while serving.count("joined") < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    store.gate.set()
    assert await asyncio.gather(*reading) == [EXPECTED] * 4
    assert sum(size for _, size in store.read) < 1.1 * BIG
    assert all(w.counted("server").get("hit", 0) >= 2 for w in workers)
    for worker in workers:
        await worker.source.close()


async def test_the_server_holds_what_fits_and_forgets_the_oldest(store: CountingStore) -> None:
    """Held and being read, together, never exceed the bound; a range that never fits is refused, and the store serves it."""
    for number in (1, 2, 3):
        await written(store, number)
    async with Serving(store, most_bytes=int(3.5 * BIG)) as serving:
        for number in (1, 2, 3, 1):
            key = f"versions/{number:08d}-1/model.safetensors"
            await serving.memory.frames(Range(key, 0, BIG, ()))
            assert serving.metrics.bytes._value.get() <= 3.5 * BIG
        assert serving.count("miss") == 4 and serving.count("hit") == 0  # 1 was gone
        await serving.memory.frames(Range("versions/00000003-1/model.safetensors", 0, BIG, ()))
        assert serving.count("hit") == 1
    async with Serving(store, most_bytes=BIG) as serving:
        with pytest.raises(Exhausted, match=r"objects.near.server_bytes"):
            await serving.memory.frames(Range("versions/00000001-1/model.safetensors", 0, BIG, ()))


async def test_a_read_outlives_those_who_asked(store: CountingStore, serving: Serving) -> None:
    """The first reader goes away; the second, who joined, gets the bytes of the same read."""
    await store.put("versions/1/x", b"abc")
    store.gate.clear()
    wanted = Range("versions/1/x", 0, 3, ())
    first = asyncio.create_task(serving.memory.frames(wanted))
    second = asyncio.create_task(serving.memory.frames(wanted))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    store.gate.set()
    assert await second == (b"\x0a\x03abc",) and len(store.read) == 1


async def test_only_what_never_changes_is_served(store: CountingStore, serving: Serving) -> None:
    """Checkpoint pointers and batch logs are nobody's business here; errors are the store's own."""
    client = WeightClient(serving.server.address, Credentials(), SystemClock())
    await store.put("checkpoints/latest", b"secret")
    refused = {
        "checkpoints/latest": InvalidInput, "versions/../checkpoints/latest": InvalidInput, "versions/none": NotFound}
    for key, kind in refused.items():
        with pytest.raises(kind):
            await client.read(Range(key, 0, None, ()))
    assert not client.resting
    await client.close()


async def test_bytes_that_are_not_what_was_published_are_not_held(store: CountingStore, serving: Serving) -> None:
    """The reader says what it expects, so a bad read of the store does not spread: nobody is sent it, nothing is kept."""
    await store.put("versions/1/x", b"abd")
    client = WeightClient(serving.server.address, Credentials(), SystemClock())
    with pytest.raises(Unavailable, match="other bytes than were published"):
        await client.read(Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abc")),)))
    assert serving.count("damaged") == 1 and serving.metrics.bytes._value.get() == 0
    await client.close()


class LyingServer:
    """Answers every range as `lie` makes it."""

    def __init__(self, store: FileStore, lie: str) -> None:
        self._store, self._lie = store, lie

    async def ReadRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        data = await self._store.get(request.key, request.offset, request.size or None)
        if self._lie == "hang":
            await asyncio.Event().wait()
        if self._lie == "break":
            raise Unavailable("gone in the middle")
        data = {"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "nothing": b""}[self._lie]
        yield pb.ReadRangeResponse(data=data).SerializeToString()

    def add(self, _: object, server: Any) -> None:
        handler = grpc.unary_stream_rpc_method_handler(
            self.ReadRange, request_deserializer=pb.ReadRangeRequest.FromString, response_serializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
            "slipstream.weights.v1.WeightService", {"ReadRange": handler}),))


@pytest.mark.parametrize("lie, outcome", [
    ("flip", "damaged"), ("cut", "damaged"), ("nothing", "damaged"), ("break", "failed"), ("hang", "failed")])
async def test_a_server_that_fails_or_lies_costs_a_read_of_the_store(
    store: CountingStore, folder: Path, monkeypatch: pytest.MonkeyPatch, lie: str, outcome: str
) -> None:
    """Wrong bytes are found by their checksums and counted, as failures are; what the folder keeps afterwards is right. After a
    failure the server is left alone for a while."""
    if lie == "hang":
        monkeypatch.setattr(weight_client, "STALL_S", 0.1)
    version = await written(store)
    lying = LyingServer(store, lie)
    async with rpc.Server("127.0.0.1", 0, [(lying.add, None)], grace_s=0) as server:
        worker = Worker(store, NodeCache(folder, 1 << 30), server.address)
        assert await read(worker.source, version) == EXPECTED
        counted = worker.counted("server")
        assert set(counted) == {outcome} and counted[outcome] == (2 if outcome == "damaged" else 1)
        assert worker.counted("store") == {"hit": 2}  # the manifest, the tensors
        await worker.source.close()
    assert await read(Worker(store, NodeCache(folder, 1 << 30)).source, version) == EXPECTED


async def test_a_dead_server_is_asked_again_after_a_while(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause doubles with each failure in a row and ends with a success."""
    now = [100.0]
    clock = SystemClock()
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    await store.put("versions/1/x", b"abc")
    async with Serving(store) as serving:
        address = serving.server.address
    client = WeightClient(address, Credentials(), clock)
    wanted, pauses = Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abc")),)), []
    for _ in range(3):
        with pytest.raises(Unavailable):
            await client.read(wanted)
        started = now[0]
        while client.resting:
            now[0] += 0.5
        pauses.append(now[0] - started)
    assert pauses == [1, 2, 4]
    await client.close()
