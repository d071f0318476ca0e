"""The buffer's part of a sample's trace: what the ledger did with it. See slipstream.tracing.

    draw          the first grant: the trace begins
    lease         each grant, with its attempt and the worker; a second one says that the first was lost
    store sample  a finished sample, durable when the span ends
    store score   likewise
    batch         the sample became part of batch k

A grant is a moment: its call may have begun before there was anything to grant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.buffer.ledger import Composition, Granted, Lease, Outcome, Scored, ScoringGrant, Submit
from services.buffer.redis_ledger import RedisLedger
from slipstream.tracing import Key, Tracer


def ledger(tracer: Tracer | None, *arguments: Any, **named: Any) -> RedisLedger:
    """The ledger in Redis; with a tracer, one that tells it of every sample."""
    if tracer is None:
        return RedisLedger(*arguments, **named)
    traced = TracedLedger(*arguments, **named)
    traced.tracer = tracer
    return traced


class TracedLedger(RedisLedger):
    """A RedisLedger whose calls leave spans."""

    tracer: Tracer

    async def grant_samples(self, worker: str, count: int, loaded: int = 0) -> Granted:
        granted = await super().grant_samples(worker, count, loaded)
        now = self.tracer.now()
        for grant in granted.grants:
            key, tracer = _key(grant.lease), self.tracer
            if (of := tracer.traced(*key[:3])) is None:
                continue
            if grant.lease.attempt == 1:
                tracer.end(tracer.begin(
                    "draw", of, key[:3], now, root=True, environment=grant.environment, task=grant.task_index), now)
            tracer.end(tracer.begin("lease", of, key, now, worker=worker, min_step=grant.min_step), now)
        return granted

    async def submit_samples(self, submits: Sequence[Submit]) -> list[Outcome]:
        started = self.tracer.now()
        outcomes = await super().submit_samples(submits)
        self._stored("store sample", [s.lease for s in submits], outcomes, started)
        return outcomes

    async def grant_scoring(self, worker: str, count: int) -> list[ScoringGrant]:
        grants = await super().grant_scoring(worker, count)
        now = self.tracer.now()
        self.tracer.hop("lease for a score", [_key(g.lease) for g in grants], now, now, worker=worker)
        return grants

    async def submit_scores(self, scores: Sequence[Scored]) -> list[Outcome]:
        started = self.tracer.now()
        outcomes = await super().submit_scores(scores)
        self._stored("store score", [s.lease for s in scores], outcomes, started)
        return outcomes

    async def read_batch(self, batch: int) -> Composition:
        """Called once for each number, before its composition goes to the batch log."""
        started = self.tracer.now()
        composition = await super().read_batch(batch)
        for group in composition.groups:
            samples = [(composition.ledger_epoch, group.draw, member.index) for member in group.members]
            self.tracer.hop("batch", samples, started, batch=batch, lag=group.lag)
        return composition

    def _stored(self, name: str, leases: Sequence[Lease], outcomes: Sequence[Outcome], started: int) -> None:
        for lease, outcome in zip(leases, outcomes, strict=True):
            self.tracer.hop(name, (_key(lease),), started, outcome=str(outcome))


def _key(lease: Lease) -> Key:
    return lease.epoch, lease.draw, lease.sample, lease.attempt
