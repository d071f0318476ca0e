"""Where a worker looks for the bytes of a policy version: the node's cache, other workers, the weight server, the object store.

consumes      byte ranges with their checksums (slipstream.ranges)    produces: bytes that hold them
waits for     another worker of the node that fetches the same range; a peer; the weight server; the object store
unblocked by  the other's end or death; an answer or the end of a time; the store's answer

The store is the truth. What a nearer place holds is compared with the manifest's checksums; whatever goes wrong there (absent,
slow, cut off, damaged, full) is counted, and the next place is asked.

Two chains that never wait for each other, so workers cannot wait in a circle:
    what this worker wants      node's cache → its owner among the peers → another one → as below
    what a peer asks of it      memory → node's cache → memory of the one who had it before → weight server → store
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.rollout.node_cache import NodeCache
from services.rollout.peer_memory import Found, PeerMemory
from services.rollout.peer_service import PeerServicer
from services.rollout.peers import REST_LONG_S, Peer, Peers
from services.rollout.weight_client import WeightClient
from slipstream import logs, rpc
from slipstream.errors import Exhausted, SlipstreamError
from slipstream.objects import ObjectStore
from slipstream.range_calls import add_weight_service, plain
from slipstream.ranges import Range
from slipstream.service import ServiceContext
from slipstream.telemetry import RolloutMetrics

PEER_PORTION = 8 << 20  # of ranges between peers: enough of them that each worker owns some
SPARES = 4  # of one object asked in vain: then nobody had it before
ORDER_INLINE = 100

log = logs.get("rollout")


class Near:
    """A RangeReader over an object store and what lies before it."""

    def __init__(
        self, store: ObjectStore, cache: NodeCache | None, server: WeightClient | None, metrics: RolloutMetrics,
        peers: Peers | None = None, memory: PeerMemory | None = None,
    ) -> None:
        """`memory`: what is offered to `peers`; one is nothing without the other."""
        self._store, self._cache, self._server, self._metrics = store, cache, server, metrics
        self._peers, self._memory = peers, memory
        self._in_vain: Counter[str] = Counter()
        self.serving: list[rpc.Registration] = []  # what peers ask, for the gRPC server

    async def read_range(self, wanted: Range) -> Found:
        if not wanted.checked:  # nothing would tell good bytes from bad ones
            return await self._truth(wanted)
        if self._peers is None:
            return await self._near(wanted)
        data, wrong = await self._near(plain(wanted))  # as others ask for it
        return data, wrong if wrong is None else await wanted.judge(data)

    def portion(self, most: int) -> int:
        return most if self._peers is None else min(most, PEER_PORTION)

    async def arranged(self, ranges: Sequence[Range]) -> Sequence[int]:
        if self._peers is None:
            return range(len(ranges))
        await self._peers.ready()
        names = [plain(each).name for each in ranges]
        if len(names) <= ORDER_INLINE:
            return self._peers.order(names)
        return await asyncio.to_thread(self._peers.order, names)

    async def through(self, wanted: Range) -> Found:
        """A range for a peer: from wherever it is but other workers' own waits. Raises what the store raises."""
        if (kept := await self.kept(wanted)) is not None:
            return kept, None
        data, wrong = await self._beyond(wanted)
        if self._cache is not None and wrong is None:
            await self._keep(self._cache, wanted, data)
        return data, wrong

    async def kept(self, wanted: Range) -> bytes | None:
        """A range from the node's folder, without its turn: whoever has that may be the one who asks."""
        cache = self._cache
        return None if cache is None else await self._try("node", wanted, lambda: cache.get(wanted.name))

    def settle(self) -> None:
        """A version is loaded: what only the former one held is counted from now on."""
        if self._memory is not None:
            self._memory.trim()

    async def close(self) -> None:
        if self._memory is not None:
            await self._memory.close()
        if self._peers is not None:
            await self._peers.close()
        if self._server is not None:
            await self._server.close()

    async def _near(self, wanted: Range) -> Found:
        cache = self._cache
        if cache is None:
            return await self._fetch(wanted)

        async def kept() -> bytes | None:
            return await cache.get(wanted.name)

        data = await self._try("node", wanted, kept)
        if data is None:
            async with cache.turn(wanted.name):
                data = await self._try("node", wanted, kept, misses=True)  # another may have fetched it meanwhile
                if data is None:
                    data, wrong = await self._fetch(wanted)
                    if wrong is None:
                        await self._keep(cache, wanted, data)
                    return data, wrong
        return data, None

    async def _fetch(self, wanted: Range) -> Found:
        """From whoever owns the range; from elsewhere, for all who ask meanwhile, when that is this worker or nobody has it."""
        peers, memory = self._peers, self._memory
        if peers is None or memory is None:
            return await self._beyond(wanted)
        await peers.ready()
        keeps = peers.keeps(wanted.name)
        if (held := memory.held(wanted.name)) is not None:
            return held, None
        for peer in peers.asked(wanted.name):
            data = await self._ask(peers, peer, wanted) if peers.pace.patient else None
            if data is not None:
                if keeps:
                    memory.keep(wanted.name, data)
                return data, None
        return await memory.own(wanted.name, lambda: self._beyond(wanted), keeps)

    async def _beyond(self, wanted: Range) -> Found:
        """From the memory of a peer that happens to hold it, the weight server, the store."""
        data = await self._from_spare(wanted)
        server = self._server
        if data is None and server is not None and not server.resting:
            data = await self._try("server", wanted, lambda: server.read(wanted))
        return (data, None) if data is not None else await self._truth(wanted)

    async def _from_spare(self, wanted: Range) -> bytes | None:
        """What this worker has come to own since, by joining or starting again, another has from before."""
        peers = self._peers
        if peers is None or self._in_vain[wanted.key] >= SPARES or not peers.owns(wanted.name) or not peers.pace.patient:
            return None
        spare = peers.spare(wanted.name)
        data = await self._ask(peers, spare, wanted, held=True) if spare is not None else None
        if data is None:
            self._in_vain[wanted.key] += 1
        return data

    async def _ask(self, peers: Peers, peer: Peer, wanted: Range, held: bool = False) -> bytes | None:
        def lied() -> None:
            peer.rest.begin(REST_LONG_S)

        return await self._try("peer", wanted, lambda: peers.read(peer, wanted, held), misses=True, lied=lied)

    async def _truth(self, wanted: Range) -> Found:
        started = asyncio.get_running_loop().time()
        data = await self._store.get(wanted.key, wanted.offset, wanted.size)
        if self._peers is not None:
            self._peers.pace.store_took(len(data), asyncio.get_running_loop().time() - started)
        wrong = await wanted.judge(data)
        self._count("store", "hit" if wrong is None else "damaged", len(data))
        return data, wrong

    async def _try(
        self, place: str, wanted: Range, read: Callable[[], Awaitable[bytes | None]], misses: bool = False,
        lied: Callable[[], None] | None = None,
    ) -> bytes | None:
        """The bytes from a nearer place; None when it has none that are right. Never raises a SlipstreamError."""
        try:
            data = await read()
            if data is None:
                if misses:
                    self._count(place, "miss")
                return None
            if await wanted.judge(data) is None:
                self._count(place, "hit", len(data))
                return data
            self._count(place, "damaged")
            log.warning("damaged bytes of a policy version, the next place is asked", place=place, key=wanted.key)
            if lied is not None:
                lied()
            if place == "node" and self._cache is not None:
                await self._cache.drop(wanted.name)
        except SlipstreamError as error:
            self._count(place, _outcome(error) if place == "peer" else "failed")
            log.warning(f"policy version: the next place is asked: {error.message}", place=place, key=wanted.key)
        return None

    async def _keep(self, cache: NodeCache, wanted: Range, data: bytes) -> None:
        try:
            await cache.put(wanted.name, data)
        except SlipstreamError as error:  # a full disk costs the cache, not the swap
            self._count("node", "failed")
            log.warning(f"a range of a policy version is not kept: {error.message}", key=wanted.key)

    def _count(self, place: str, outcome: str, size: int = 0) -> None:
        self._metrics.weight_reads.labels(place, outcome).inc()
        if outcome == "hit":
            self._metrics.weight_bytes.labels(place).inc(size)


def _outcome(error: SlipstreamError) -> str:
    """What became of asking a peer, in a word."""
    if isinstance(error, Exhausted):
        return "full"
    return "slow" if error.reason in ("STALLED", "DEADLINE") else "failed"


def nearest(context: ServiceContext, metrics: RolloutMetrics) -> Near | ObjectStore:
    """What the run file names before the store; the store itself when it names nothing. Raises ConfigError."""
    settings, run = context.run.objects.near, context.run.run.name
    if not settings.cache and not settings.server and not settings.peers:
        return context.store
    cache = NodeCache(Path(settings.cache).expanduser(), settings.cache_bytes) if settings.cache else None
    server = WeightClient(settings.server, context.credentials, context.clock) if settings.server else None
    if not settings.peers:
        return Near(context.store, cache, server, metrics)
    peers = Peers(settings.peers, run, lambda: context.address, context.credentials, context.clock)
    memory = PeerMemory(settings.peer_bytes)
    near = Near(context.store, cache, server, metrics, peers, memory)
    servicer = PeerServicer(run, memory, peers, near, context.lifecycle.stopping, metrics)
    near.serving.append((add_weight_service, servicer))
    context.lifecycle.spawn("peers", peers.watch())
    return near
