"""Figures of the buffer for metrics and status, read from the ledger's counters once a second."""

from __future__ import annotations

from services.buffer.account import keep
from services.buffer.front import Front
from services.buffer.signals import wanted_samples
from services.buffer.stalls import HEARD_S, Stalls
from slipstream import logs
from slipstream.errors import Unavailable
from slipstream.service import ServiceContext

log = logs.get("buffer")


class Gauges:
    def __init__(self, front: Front, context: ServiceContext) -> None:
        self._front, self._context = front, context
        self._dropped: dict[str, int] | None = None  # as of the last look; counters of metrics begin with this process
        self._expired: dict[str, int] = {}
        self._stalls = Stalls(front, front.ledger.rules.lease_ms / 1000)
        context.judge_progress(lambda: self._stalls.marker, self._stalls.awaiting)
        self._kept = -1  # committed batch as of the last balance in the store
        front.metrics.quota_bytes.set(front.ledger.rules.quota_bytes)
        front.metrics.max_lag.set(front.ledger.rules.max_lag)

    async def update(self) -> None:
        """One look. Raises Unavailable when Redis is away."""
        front, metrics = self._front, self._front.metrics
        try:
            balance = await front.ledger.balance()
        except Unavailable as error:
            self._stalls.unreachable = f"Redis: {error.message}"
            raise
        self._stalls.look(balance)
        for service in ("rollout", "reward"):
            metrics.workers.labels(service).set(len(front.connected(service, max(HEARD_S, front.ledger.rules.lease_ms / 1000))))
        await front.refresh_versions()
        meta, samples, groups = balance.meta, balance.samples, balance.groups
        metrics.open_draws.set(groups.get("open", 0) + groups.get("complete", 0) + groups.get("short", 0))
        metrics.outstanding_groups.set(meta["outstanding"])
        metrics.leases.labels("sample").set(samples.get("leased", 0))
        metrics.leases.labels("scoring").set(samples.get("scoring", 0))
        metrics.unscored_samples.set(samples.get("unscored", 0))
        metrics.complete_groups.set(meta["ready"])
        metrics.wanted_samples.set(wanted_samples(front.ledger.rules, balance))
        metrics.bytes.set(meta.get("bytes", 0))
        metrics.published_step.set(meta["published"])
        metrics.numbered_batch.set(meta.get("numbered", 0))
        metrics.committed_batch.set(meta.get("committed", 0))
        metrics.incarnation.set(meta.get("incarnation", 0))
        off = abs(sum(groups.values()) - meta.get("next_draw", 0) + meta.get("lost", 0))
        metrics.imbalance.set(off + abs(sum(balance.dropped.values()) - groups.get("dropped", 0)))
        await self._keep(meta.get("committed", 0))
        self._count(dict(balance.dropped), {"sample": meta.get("expired", 0), "scoring": meta.get("scoring_expired", 0)})
        context = self._context
        context.policy_version = front.newest
        context.figures.update(
            draws=meta.get("next_draw", 0), lost_draws=meta.get("lost", 0), outstanding_groups=meta["outstanding"],
            dropped_groups=sum(balance.dropped.values()),
            failed_groups=balance.dropped.get("failed", 0) + balance.dropped.get("timeout", 0),
            repeated_grants=meta.get("expired", 0), complete_groups=meta["ready"], unscored_samples=samples.get("unscored", 0),
            leased_samples=samples.get("leased", 0), bytes=meta.get("bytes", 0), published_step=meta["published"],
            numbered_batch=meta.get("numbered", 0), committed_batch=meta.get("committed", 0))
        context.details.update(
            samples=dict(samples), groups=dict(groups), dropped=dict(balance.dropped), waiting=dict(front.waiting))

    async def _keep(self, committed: int) -> None:
        """After a commit: the balance goes to the store, beside the archive of what was committed. Leases change with every
        call, and counting ten thousand takes the server as long as a hundred calls: they are left to the last state."""
        if committed != self._kept:
            self._kept = committed
            try:
                await keep(self._front, self._context.clock, self._context.store, leases=False)
            except Unavailable as error:
                log.warning(f"the balance was not written to the store: {error.message}")

    def _count(self, dropped: dict[str, int], expired: dict[str, int]) -> None:
        metrics = self._front.metrics
        if self._dropped is not None:
            for reason, count in dropped.items():
                metrics.groups_dropped.labels(reason).inc(max(0, count - self._dropped.get(reason, 0)))
            for kind, count in expired.items():
                metrics.leases_expired.labels(kind).inc(max(0, count - self._expired.get(kind, 0)))
        self._dropped, self._expired = dropped, expired
