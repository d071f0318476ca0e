"""The weight server as a process, and workers that serve each other, before a real S3 server: what readers cost the store, and
what deaths cost them."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from s3_faults import FaultProxy, fault_proxy
from s3_server import open_bucket, s3_server

from services.rollout import peers, weight_client
from services.rollout.near import Near
from services.rollout.weight_client import WeightClient
from slipstream import tensors as tensors_module
from slipstream import tls_authority
from slipstream.auth_credentials import Credentials
from slipstream.errors import SlipstreamError
from slipstream.lifecycle import SystemClock
from slipstream.manifest import RawTensor, read_manifest, read_tensors, write_version
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.ranges import Range
from slipstream.s3 import S3Store
from slipstream.telemetry import RolloutMetrics
from slipstream.tls import Certificates
from tests.peer_fleet import Fleet

TENSORS, SIZE, READERS = 12, 128 << 10, 4
pytestmark = pytest.mark.slow


class Egress(FaultProxy):
    """Counts the bytes that leave the store."""

    sent = 0

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        reply = await super()._ask(head, body)
        self.sent += len(reply) if head.startswith(b"GET") else 0
        return reply


@pytest.fixture(scope="module")
def proxy() -> Iterator[Egress]:
    """Before an S3 server, in a thread of its own: it outlives the event loops of tests."""
    found: queue.Queue[Any] = queue.Queue()
    done = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve(endpoint: str) -> None:
        async with fault_proxy(endpoint, kind=Egress) as proxy:
            found.put(proxy)
            await done.wait()

    with s3_server() as endpoint:
        thread = threading.Thread(target=loop.run_until_complete, args=(serve(endpoint),))
        thread.start()
        yield found.get(timeout=10)
        loop.call_soon_threadsafe(done.set)
        thread.join(10)


@pytest.fixture
async def store(proxy: Egress) -> AsyncIterator[S3Store]:
    async with open_bucket(proxy.url, "run") as store:
        yield store


class Process:
    """`python -m services.weights`, and whoever asks it."""

    def __init__(self, folder: Path, url: str, endpoint: str, **more: Any) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / "run.json"
        path.write_text(json.dumps({
            "run": {"name": "test", "folder": str(folder / "run")}, "model": {"path": "/nowhere"},
            "service": {"metrics": False}, "environments": [{"name": "e", "entry": "module:Class"}],
            "objects": {"url": url, "endpoint": endpoint, "near": {"server_bytes": 1 << 26}}, **more}))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.weights", "--run-file", str(path), "--instance", "weights-0"],
            stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert self._process.stderr is not None
        self.address = ""
        while not self.address and (line := self._process.stderr.readline()):
            fields = json.loads(line)
            self.address = fields["address"] if fields["message"] == "serving" else ""
        assert self.address, "it never served"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def server(tmp_path: Path, store: S3Store, proxy: Egress) -> Iterator[Process]:
    process = Process(tmp_path / "weights", store.url, proxy.url)
    yield process
    process.close()


def reader(store: S3Store, server: Process) -> tuple[Near, RolloutMetrics]:
    metrics = RolloutMetrics(CollectorRegistry())
    return Near(store, None, WeightClient(server.address, Credentials(), SystemClock()), metrics), metrics


@pytest.fixture
async def version(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> PolicyVersion:
    """1.5 MB in twelve ranges."""
    monkeypatch.setattr(tensors_module, "READ_BYTES", SIZE)
    return await write_version(
        store, run="test", number=1, step=1, incarnation=1, files={},
        tensors=[RawTensor(f"layer{i:02d}", "F32", (SIZE // 4,), random.Random(i).randbytes(SIZE)) for i in range(TENSORS)])


EXPECTED = {f"layer{i:02d}": random.Random(i).randbytes(SIZE) for i in range(TENSORS)}


async def read(source: Any, version: PolicyVersion) -> dict[str, bytes]:
    return {t.name: bytes(t.data) for t in await read_tensors(source, await read_manifest(source, version, "test"))}


async def test_four_readers_cost_one_read_and_a_server_that_goes_costs_no_version(
    store: S3Store, proxy: Egress, server: Process, version: PolicyVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the server four readers fetch everything four times from S3; with it, once. Then it stands still after a third of
    a version was read from it, and another time it is killed there: the rest comes from S3, every byte right."""
    proxy.sent = 0
    await asyncio.gather(*(read(store, version) for _ in range(READERS)))
    without, proxy.sent = proxy.sent, 0
    readers = [reader(store, server)[0] for _ in range(READERS)]
    assert await asyncio.gather(*(read(r, version) for r in readers)) == [EXPECTED] * READERS
    one = TENSORS * SIZE
    assert 0.98 * READERS * one <= without and one <= proxy.sent <= 1.05 * one
    monkeypatch.setattr(weight_client, "STALL_S", 1.0)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        server.signal(signal.SIGCONT)
        await goes_in_the_middle(store, server, version, monkeypatch, number)
    for each in readers:
        await each.close()


async def goes_in_the_middle(
    store: S3Store, server: Process, version: PolicyVersion, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    answered, plain = 0, WeightClient.read

    async def until_it_goes(self: WeightClient, wanted: Range) -> bytes:
        nonlocal answered
        answered += 1
        if answered == TENSORS // 3:
            server.signal(number)
        return await plain(self, wanted)

    near, metrics = reader(store, server)
    with monkeypatch.context() as patched:
        patched.setattr(WeightClient, "read", until_it_goes)
        async with asyncio.timeout(20):
            assert await read(near, version) == EXPECTED
    counted = {
        (s.labels["place"], s.labels["outcome"]): s.value for m in metrics.weight_reads.collect() for s in m.samples
        if s.name.endswith("_total")}
    assert counted["server", "hit"] >= 1 and counted["server", "failed"] >= 1
    assert counted["store", "hit"] >= TENSORS // 2 and counted["server", "hit"] + counted["store", "hit"] == TENSORS + 1
    await near.close()


async def test_eight_workers_that_serve_each_other_cost_what_one_costs(
    store: S3Store, proxy: Egress, version: PolicyVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any server: every range leaves S3 once for all. A worker that comes when two of them are gone takes most of it
    from the rest."""
    proxy.sent = 0
    assert await read(store, version) == EXPECTED
    one, proxy.sent = proxy.sent, 0
    monkeypatch.setattr(peers, "SILENCE_S", 10.0)
    async with Fleet(store) as fleet:
        fleet.known(monkeypatch)
        await fleet.add(8)
        assert await fleet.read(version) == [EXPECTED] * 8
        assert proxy.sent <= 1.05 * one
        await asyncio.gather(*(r.server.stop() for r in fleet.readers[:2]))
        later, = await fleet.add(1)
        proxy.sent = 0
        assert await later.read(version) == EXPECTED and proxy.sent <= 0.8 * one


async def test_only_a_rollout_worker_of_the_run_is_served(tmp_path: Path) -> None:
    """With certificates the server shows the buffer's, and asks for a rollout worker's: a trainer's is refused."""
    folder, authority = tmp_path / "tls", tls_authority.create_authority()
    for role in ("buffer", "rollout", "trainer"):
        tls_authority.issue(authority, folder / role, role)
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "x").write_bytes(b"abc")
    server = Process(tmp_path / "weights", f"file://{tmp_path}", "", security={"tls_dir": str(folder)})
    try:
        async def ask(role: str) -> bytes:
            own = Credentials(role, "test", certificates=Certificates(folder, role))
            client = WeightClient(server.address, own, SystemClock())
            try:
                return await client.read(Range("versions/x", 0, 3, ()))
            finally:
                await client.close()

        assert await ask("rollout") == b"abc"
        with pytest.raises(SlipstreamError, match="is for rollout, not for role trainer"):
            await ask("trainer")
    finally:
        server.close()
