"""The bench on which every ledger is tested: rules, a hand-driven clock, a trainer, and what workers do most of the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from services.buffer.connection import connect
from services.buffer.ledger import Grant, Ledger, Outcome, Rules, Submit, Version
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.redis_ledger import RedisLedger

RULES = Rules(
    run="contract", seed=3, steps=50, groups_per_batch=2, group_size=2, max_lag=1, pinned=False, lease_ms=1000,
    scoring_lease_ms=1000, max_attempts=3, group_timeout_ms=0, quota_bytes=1 << 20, sample_bytes=100, keep_versions=2,
    over_lag={"sort": "wait"}, weights={"sort": 1.0})


class Bench:
    """A ledger under a hand-driven clock, with a trainer that has taken its incarnation."""

    def __init__(self, kind: str, url: str, admin_url: str = "") -> None:
        self.kind, self.url, self.admin_url, self.now, self.incarnation = kind, url, admin_url, 1_000_000, 0
        self.model: MemoryLedger | None = None
        self.clients: list[Any] = []

    async def open(self, **changes: Any) -> Ledger:
        """The ledger under rules with these changes; opening again joins the same contents."""
        rules = dataclasses.replace(RULES, **changes)
        if self.kind == "memory":
            ledger = MemoryLedger(rules, lambda: self.now)
            if self.model:
                ledger._state = self.model._state
            self.model = ledger
        else:
            self.clients.append(connect(self.url))
            ledger = RedisLedger(self.clients[-1], rules, lambda: self.now)
        await ledger.open({"sort": 0})
        self.now += 2000  # past the grace of the start
        return ledger

    async def start(self, **changes: Any) -> Ledger:
        """Open, take incarnation 1, publish step 0."""
        ledger = await self.open(**changes)
        self.incarnation = (await ledger.take_incarnation(0, 0)).incarnation
        await self.publish(ledger, 0)
        return ledger

    async def publish(self, ledger: Ledger, step: int) -> list[Version]:
        number = await ledger.reserve_version(self.incarnation, step)
        return await ledger.publish_version(Version(number, step, self.incarnation, f"versions/{number}", 7))


async def grant(ledger: Ledger, count: int = 100, worker: str = "w") -> Sequence[Grant]:
    return (await ledger.grant_samples(worker, count)).grants


def submit(grant: Grant, step: int = 0, incarnation: int = 1, body: bytes = b"body", **fields: Any) -> Submit:
    parts: dict[str, Any] = {"transcript": b"text"} | fields
    return Submit(grant.lease, body, sum(body), 5, 3, [(step, incarnation)], **parts)


async def finish(ledger: Ledger, grants: Sequence[Grant], step: int = 0, incarnation: int = 1) -> None:
    """Submit with a score from the environment."""
    outcomes = await ledger.submit_samples([submit(g, step, incarnation, transcript=b"", score=b"1") for g in grants])
    assert set(outcomes) <= {Outcome.ACCEPTED}


def draws(grants: Sequence[Grant]) -> list[int]:
    return sorted({g.lease.draw for g in grants})


async def batch_draws(ledger: Ledger, batch: int) -> list[int]:
    return [g.draw for g in (await ledger.read_batch(batch)).groups]


async def straggle(bench: Bench, ledger: Ledger) -> list[Grant]:
    """Batch 1 is draws 1 and 2, and is trained; draw 0 has its leases (returned) since step 0; all others are complete."""
    grants = await grant(ledger)
    await finish(ledger, [g for g in grants if g.lease.draw in (1, 2)])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await finish(ledger, [g for g in grants if g.lease.draw == 3])
    await finish(ledger, await grant(ledger), step=1)
    return [g for g in grants if g.lease.draw == 0]
