"""What 32 workers cost the object store over one, and how much longer they take, with workers that serve each other.

    python -m benchmarks.peers --json FILE [--megabytes 16] [--rounds 3]

Workers are gRPC servers and readers as the rollout service makes them (no engine), all in this process, on a store whose egress
is bounded as that of a bucket or a NAT gateway is: EGRESS_BYTES_S for all readers together. A version in ranges of PORTION, and
a patch of it, are announced to all at the same instant. Each round is one worker and then 32, all new; medians:

store_bytes_32_over_1   bytes that left the store for 32 workers, over those for one: a complete version and its patch
time_32_over_1          time until the last of 32 workers has both, over the time of one. One process moves the bytes of all 32
                        and applies their patches, so this is an upper bound: on machines of their own they share no CPU
alone_...               the same two without peers, one round
killed_...              with peers, when 4 of 32 servers end after a tenth of the time of one worker; their own reads go on
joined_store_bytes_over_1   bytes for one more worker, which comes when 32 have the versions
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.record import publish
from services.rollout import near, peers
from services.rollout.near import Near
from services.rollout.peer_memory import PeerMemory
from services.rollout.peer_service import PeerServicer
from services.rollout.peers import Peers
from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.lifecycle import SystemClock
from slipstream.manifest import Held, RawTensor, read_manifest, read_tensors, write_version
from slipstream.objects import FileStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.range_calls import add_weight_service
from slipstream.telemetry import RolloutMetrics

WORKERS, KILLED = 32, 4
EGRESS_BYTES_S = 16 << 20
PORTION = 256 << 10
CHANGED = 0.02  # of a tensor's elements, in the patch


class BoundedStore(FileStore):
    """Answers no faster than EGRESS_BYTES_S for all readers together."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sent, self._free = 0, 0.0

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(key, offset, size)
        self.sent += len(data)
        self._free = max(self._free, time.monotonic()) + len(data) / EGRESS_BYTES_S
        await asyncio.sleep(self._free - time.monotonic())
        return data


class Worker:
    """A reader of versions and, with peers, a server of them."""

    def __init__(self, store: FileStore, named: list[str]) -> None:
        metrics, credentials, self.address = RolloutMetrics(CollectorRegistry()), Credentials("rollout"), ""
        self.peers = Peers(named, "peers", lambda: self.address, credentials, SystemClock())
        memory = PeerMemory(1 << 30)
        self.source = Near(store, None, None, metrics, self.peers, memory)
        self.server = rpc.Server("127.0.0.1", 0, [(add_weight_service, PeerServicer(
            "peers", memory, self.peers, self.source, asyncio.Event(), metrics))], grace_s=0)

    async def read(self, versions: list[PolicyVersion]) -> None:
        """A complete version, then its patch."""
        held = None
        for version in versions:
            manifest = await read_manifest(self.source, version, "peers")
            held = Held(version, await read_tensors(self.source, manifest, held), manifest.full)


@contextlib.asynccontextmanager
async def fleet(store: FileStore, count: int) -> AsyncIterator[list[Worker]]:
    """Workers that know each other; what is appended to the list is closed with them."""
    workers: list[Worker] = []
    try:
        await joined(store, workers, count)
        yield workers
    finally:
        for worker in workers:
            await worker.source.close()
        await asyncio.gather(*(w.server.stop() for w in workers))


async def joined(store: FileStore, workers: list[Worker], count: int) -> None:
    """`count` more workers, known to all. The list is what a look-up of its one name gives."""
    for _ in range(count):
        worker = Worker(store, ["localhost:1"])
        await worker.server.start()
        worker.address = worker.server.address
        workers.append(worker)

    async def addresses(entry: str) -> list[str]:
        return [w.address for w in workers]

    plain, peers._addresses = peers._addresses, addresses
    try:
        await asyncio.gather(*(w.peers.look_up() for w in workers))
    finally:
        peers._addresses = plain


async def written(store: FileStore, size: int) -> list[PolicyVersion]:
    """A complete version and a patch of it."""
    chance, width = random.Random(0), PORTION // 2
    before, after = [], []
    for n in range(max(1, size // PORTION)):
        data = bytearray(chance.randbytes(2 * width))
        before.append(RawTensor(f"layer{n:04d}", "BF16", (width,), bytes(data)))
        for place in chance.sample(range(width), int(CHANGED * width)):
            data[2 * place] ^= 1
        after.append(RawTensor(f"layer{n:04d}", "BF16", (width,), bytes(data)))
    first = await write_version(store, run="peers", number=1, step=1, incarnation=1, tensors=before, files={})
    second = await write_version(
        store, run="peers", number=2, step=2, incarnation=1, tensors=after, files={}, parent=Held(first, before, 1))
    return [first, second]


async def together(store: BoundedStore, workers: list[Worker], versions: list[PolicyVersion]) -> tuple[int, float]:
    """(bytes, seconds) until all have all."""
    before, started = store.sent, time.perf_counter()
    await asyncio.gather(*(w.read(versions) for w in workers))
    return store.sent - before, time.perf_counter() - started


async def alone(store: BoundedStore, count: int, versions: list[PolicyVersion]) -> tuple[int, float]:
    """The same without peers."""
    async def read() -> None:
        held = None
        for version in versions:
            manifest = await read_manifest(store, version, "peers")
            held = Held(version, await read_tensors(store, manifest, held), manifest.full)

    before, started = store.sent, time.perf_counter()
    await asyncio.gather(*(read() for _ in range(count)))
    return store.sent - before, time.perf_counter() - started


async def measure(size: int, rounds: int) -> dict[str, float]:
    """All figures."""
    near.PEER_PORTION = PORTION
    ratios: dict[str, list[float]] = {}

    def note(name: str, many: tuple[int, float], one: tuple[int, float]) -> None:
        ratios.setdefault(f"{name}store_bytes_32_over_1", []).append(many[0] / one[0])
        ratios.setdefault(f"{name}time_32_over_1", []).append(many[1] / one[1])

    with tempfile.TemporaryDirectory() as folder:
        store = BoundedStore(Path(folder))
        versions = await written(store, size)
        for n in range(rounds):
            async with fleet(store, 1) as workers:
                one = await together(store, workers, versions)
            async with fleet(store, WORKERS) as workers:
                note("", await together(store, workers, versions), one)
                await joined(store, workers, 1)
                more = await together(store, workers[-1:], versions)
                ratios.setdefault("joined_store_bytes_over_1", []).append(more[0] / one[0])
            async with fleet(store, WORKERS) as workers:
                reading = asyncio.create_task(together(store, workers, versions))
                await asyncio.sleep(one[1] / 10)
                await asyncio.gather(*(w.server.stop() for w in workers[:KILLED]))
                note("killed_", await reading, one)
            if n == 0:
                note("alone_", await alone(store, WORKERS, versions), await alone(store, 1, versions))
    return {name: statistics.median(values) for name, values in ratios.items()}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    figures = rpc.run(measure(arguments.megabytes << 20, arguments.rounds))
    rows = [[name, f"{value:.3f}"] for name, value in figures.items()]
    publish("workers that serve each other", ["figure", "value"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
