"""Rollout workers as far as peers see them: gRPC servers and readers of versions, all in this process, on one store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.rollout import peers
from services.rollout.near import Near
from services.rollout.node_cache import NodeCache
from services.rollout.peer_memory import PeerMemory
from services.rollout.peer_service import PeerServicer
from services.rollout.peers import Peers
from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.errors import Exhausted, NotFound, Unavailable
from slipstream.lifecycle import Clock, SystemClock
from slipstream.manifest import Held, RawTensor, read_manifest, read_tensors
from slipstream.objects import FileStore, ObjectStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.range_calls import add_weight_service, frames
from slipstream.telemetry import RolloutMetrics
from tests.ports import free_port

RUN = "test"


class CountingStore(FileStore):
    """Remembers what was read: (key, offset) and bytes. `pause_s`: how long each read takes at least."""

    def __init__(self, root: Path, pause_s: float = 0.0) -> None:
        super().__init__(root)
        self.pause_s = pause_s
        self.reads: Counter[tuple[str, int]] = Counter()
        self.bytes = 0

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        self.reads[key, offset] += 1
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        data = await super().get(key, offset, size)
        self.bytes += len(data)
        return data


class Reader:
    """One worker: what it offers, what it reads. `serve` answers in its place, if given."""

    def __init__(
        self, fleet: Fleet, port: int, serve: Callable[[Reader], Any] | None = None, cache: Path | None = None,
        most_bytes: int = 1 << 30,
    ) -> None:
        self.address = f"127.0.0.1:{port}"
        self.metrics = RolloutMetrics(CollectorRegistry())
        self.peers = Peers(("localhost:1",), RUN, lambda: self.address, fleet.credentials, fleet.clock)
        self.memory, self.stopping = PeerMemory(most_bytes), asyncio.Event()
        self.source = Near(
            fleet.store, NodeCache(cache, 1 << 30) if cache else None, None, self.metrics, self.peers, self.memory)
        self.servicer = PeerServicer(RUN, self.memory, self.peers, self.source, self.stopping, self.metrics)
        self.held: Held | None = None
        self.server = rpc.Server(
            "127.0.0.1", port, [(add_weight_service, serve(self) if serve else self.servicer)], grace_s=0,
            credentials=fleet.credentials)

    async def read(self, version: PolicyVersion) -> dict[str, bytes]:
        """A version's tensors; a patch goes on from what was read before."""
        manifest = await read_manifest(self.source, version, RUN)
        tensors = await read_tensors(self.source, manifest, self.held)
        self.held = Held(version, tensors, manifest.full)
        return contents(tensors)

    def counted(self, place: str) -> dict[str, int]:
        """Ranges by outcome."""
        return {
            s.labels["outcome"]: int(s.value) for m in self.metrics.weight_reads.collect() for s in m.samples
            if s.name.endswith("_total") and s.labels["place"] == place}


class Fleet:
    """Workers that find each other as one does by DNS: `addresses` is what a look-up gives."""

    def __init__(self, store: ObjectStore, clock: Clock | None = None, credentials: Credentials | None = None) -> None:
        self.store, self.clock, self.credentials = store, clock or SystemClock(), credentials or Credentials("rollout")
        self.readers: list[Reader] = []

    @property
    def addresses(self) -> list[str]:
        return [r.address for r in self.readers]

    def known(self, patch: pytest.MonkeyPatch) -> None:
        """Look-ups find these workers, and hashes go by their order, not by ports: the same owners in every run of a test."""
        async def look_up(entry: str) -> list[str]:
            return self.addresses

        def score(member: str, name: str, plain: Callable[[str, str], bytes] = peers._score) -> bytes:
            return plain(str(self.addresses.index(member)) if member in self.addresses else member, name)

        patch.setattr(peers, "_addresses", look_up)
        patch.setattr(peers, "_score", score)

    async def add(self, count: int, **how: Any) -> list[Reader]:
        """Workers that serve and are known to all."""
        before = len(self.readers)
        for _ in range(count):
            self.readers.append(reader := Reader(self, free_port(), **how))
            await reader.server.start()  # before the next port is looked for
        for reader in self.readers:
            await reader.peers.look_up()
        return self.readers[before:]

    async def read(self, version: PolicyVersion) -> list[dict[str, bytes]]:
        """All at the same instant."""
        return await asyncio.gather(*(r.read(version) for r in self.readers))

    def owner_of(self, name: str) -> Reader:
        return next(r for r in self.readers if r.peers.owns(name))

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self.readers:
            await reader.source.close()
        await asyncio.gather(*(r.server.stop() for r in self.readers))


class Faulty:
    """A peer that answers ranges as `fault` says; bytes that it does send come from `store` directly."""

    FAULTS = ("flip", "cut", "grow", "nothing", "endless", "break", "hang", "silent", "miss", "full", "run", "bug")

    def __init__(self, store: ObjectStore, fault: str) -> None:
        self._store, self._fault = store, fault
        self.asked = 0

    async def ReadRange(self, request: pb.ReadRangeRequest, context: Any) -> AsyncIterator[bytes]:
        self.asked += 1
        errors = {
            "miss": NotFound("not here", "OBJECT"), "full": Exhausted("later", "CALLS"), "run": NotFound("another", "RUN"),
            "bug": ZeroDivisionError("a bug")}
        if self._fault in errors:
            raise errors[self._fault]
        while self._fault == "hang":  # alive, and never done
            yield b""
            await asyncio.sleep(0.02)
        if self._fault == "silent":
            await asyncio.Event().wait()
        data = await FileStore.get(self._store, request.key, request.offset, request.size or None)  # type: ignore[arg-type]
        half = len(data) // 2
        pieces = {
            "flip": [data[:half], bytes([data[half] ^ 1]), data[half + 1 :]], "cut": [data[:-1]], "grow": [data, b"x"],
            "nothing": [b""], "endless": [data] * 1000, "break": [data[:half]]}[self._fault]
        for piece in pieces:
            for frame in frames(piece):
                yield frame
        if self._fault == "break":
            raise Unavailable("gone in the middle")


def contents(tensors: Sequence[RawTensor]) -> dict[str, bytes]:
    return {t.name: bytes(t.data) for t in tensors}


async def ask(reader: Reader, request: pb.ReadRangeRequest, credentials: Credentials | None = None) -> bytes:
    """One call as another worker makes it; raises grpc.aio.AioRpcError."""
    async with rpc.channel(reader.address, credentials=credentials or Credentials("rollout"), peer="rollout") as channel:
        call: grpc.aio.UnaryStreamCall[Any, pb.ReadRangeResponse] = channel.unary_stream(
            "/slipstream.weights.v1.WeightService/ReadRange", pb.ReadRangeRequest.SerializeToString,
            pb.ReadRangeResponse.FromString)(request, timeout=10)
        return b"".join([message.data async for message in call])
