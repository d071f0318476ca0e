"""Where a worker looks for the bytes of a policy version: the node's cache, the weight server, then the object store.

consumes      byte ranges with their checksums (slipstream.ranges)    produces: bytes that hold them
waits for     another worker of the node that fetches the same range; the weight server; the object store
unblocked by  the other's end or death; an answer or the end of a time; the store's answer

The store is the truth. What a nearer place holds is compared with the manifest's checksums; whatever goes wrong there (absent,
slow, cut off, damaged, full) is counted, and the next place is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from services.rollout.node_cache import NodeCache
from services.rollout.weight_client import WeightClient
from slipstream import logs
from slipstream.errors import SlipstreamError
from slipstream.objects import ObjectStore
from slipstream.ranges import Range
from slipstream.service import ServiceContext
from slipstream.telemetry import RolloutMetrics

log = logs.get("rollout")


class Near:
    """A RangeReader over an object store and what lies before it."""

    def __init__(
        self, store: ObjectStore, cache: NodeCache | None, server: WeightClient | None, metrics: RolloutMetrics,
    ) -> None:
        self._store, self._cache, self._server, self._metrics = store, cache, server, metrics

    async def read_range(self, wanted: Range) -> tuple[bytes, int | None]:
        if not wanted.checked:  # nothing would tell good bytes from bad ones
            return await self._truth(wanted)
        cache = self._cache
        if cache is None:
            return await self._fetch(wanted)
        data = await self._try("node", wanted, cache.get)
        if data is None:
            async with cache.turn(wanted.name):
                data = await self._try("node", wanted, cache.get, misses=True)  # another may have fetched it meanwhile
                if data is None:
                    data, wrong = await self._fetch(wanted)
                    if wrong is None:
                        await self._keep(cache, wanted, data)
                    return data, wrong
        return data, None

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    async def _fetch(self, wanted: Range) -> tuple[bytes, int | None]:
        server = self._server
        if server is not None and not server.resting:
            data = await self._try("server", wanted, lambda name: server.read(wanted))
            if data is not None:
                return data, None
        return await self._truth(wanted)

    async def _truth(self, wanted: Range) -> tuple[bytes, int | None]:
        data = await self._store.get(wanted.key, wanted.offset, wanted.size)
        wrong = await wanted.judge(data)
        self._count("store", "hit" if wrong is None else "damaged", len(data))
        return data, wrong

    async def _try(
        self, place: str, wanted: Range, read: Callable[[str], Awaitable[bytes | None]], misses: bool = False,
    ) -> bytes | None:
        """The bytes from a nearer place; None when it has none that are right. Never raises a SlipstreamError."""
        try:
            data = await read(wanted.name)
            if data is None:
                if misses:
                    self._count(place, "miss")
                return None
            if await wanted.judge(data) is None:
                self._count(place, "hit", len(data))
                return data
            self._count(place, "damaged")
            log.warning("damaged bytes of a policy version, the next place is asked", place=place, key=wanted.key)
            if place == "node" and self._cache is not None:
                await self._cache.drop(wanted.name)
        except SlipstreamError as error:
            self._count(place, "failed")
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


def nearest(context: ServiceContext, metrics: RolloutMetrics) -> Near | ObjectStore:
    """What the run file names before the store; the store itself when it names nothing. Raises ConfigError."""
    settings = context.run.objects.near
    if not settings.cache and not settings.server:
        return context.store
    cache = NodeCache(Path(settings.cache).expanduser(), settings.cache_bytes) if settings.cache else None
    server = WeightClient(settings.server, context.credentials, context.clock) if settings.server else None
    return Near(context.store, cache, server, metrics)
