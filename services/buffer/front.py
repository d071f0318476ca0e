"""What the gRPC services of the buffer share: the ledger, long polls, the newest policy version, counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from google.rpc import status_pb2

from services.buffer.changes import Changes
from services.buffer.ledger import Grant, Lease, Ledger, Outcome, ScoringGrant, Version
from slipstream import seeds
from slipstream.errors import ConfigError, Conflict, Fenced, InvalidInput, SlipstreamError, to_status
from slipstream.protos.types.v1 import policy_pb2, sample_pb2
from slipstream.telemetry import BufferMetrics

OK = status_pb2.Status()


class Front:
    """One buffer process. Any number of them may serve one ledger."""

    def __init__(self, ledger: Ledger, metrics: BufferMetrics, run_hash: str = "") -> None:
        self.ledger, self.metrics, self.run_hash = ledger, metrics, run_hash
        self.changes = Changes()
        self.waiting: dict[str, str] = {}  # who -> what they wait for
        self.heard: dict[str, dict[str, float]] = {}  # service -> worker -> when it last called, by the event loop's clock
        self.leases_kept = float("-inf")  # when a rollout worker last kept leases alive
        self.versions: list[policy_pb2.PolicyVersion] = []  # newest first
        self._versions_stale, self._publications = True, 0
        ledger.on_change = self._changed

    def _changed(self, topics: Sequence[str]) -> None:
        if "versions" in topics:
            self._versions_stale = True
        self.changes.notify(topics)

    async def refresh_versions(self, force: bool = False) -> None:
        """Read the list of versions when it may have changed; other fronts' changes come with the slow poll."""
        if self._versions_stale or force:
            self._versions_stale, publications = False, self._publications
            try:
                versions = await self.ledger.versions()
            except SlipstreamError:
                self._versions_stale = True
                raise
            if self._publications == publications:  # else that has told what is newer
                self._know(versions)

    def published(self, versions: Sequence[Version]) -> None:
        """The list of versions as a publication left it. In the turn of the event loop in which the ledger told of that."""
        self._versions_stale, self._publications = False, self._publications + 1
        self._know(versions)

    def _know(self, known: Sequence[Version]) -> None:
        versions = [to_version(v) for v in known]
        if versions != self.versions:
            self.versions = versions
            self.changes.notify(("versions",))

    @property
    def newest(self) -> policy_pb2.PolicyVersion | None:
        return self.versions[0] if self.versions else None

    def hear(self, service: str, worker: str) -> None:
        """A worker, or the trainer, has called."""
        self.heard.setdefault(service, {})[worker] = asyncio.get_running_loop().time()

    def connected(self, service: str, within_s: float) -> list[str]:
        """Who has called lately; the others are forgotten."""
        least = asyncio.get_running_loop().time() - within_s
        names = self.heard[service] = {w: at for w, at in self.heard.get(service, {}).items() if at >= least}
        return sorted(names)

    def task(self, grant: Grant | ScoringGrant) -> sample_pb2.Task:
        """The task of a grant."""
        seed = seeds.task_seed(self.ledger.rules.seed, grant.environment, grant.lease.draw)
        return sample_pb2.Task(environment=grant.environment, index=grant.task_index, seed=seed)

    def rejected(self, error: SlipstreamError) -> status_pb2.Status:
        """A refused item as a status, counted by reason."""
        self.metrics.rejected.labels(error.reason).inc()
        return to_status(error)

    def statuses(
            self, outcomes: Sequence[Outcome], leases: Sequence[Lease], outdated_is_ok: bool = False,
    ) -> list[status_pb2.Status]:
        """The statuses of a list's outcomes."""
        if outcomes.count(Outcome.ACCEPTED) == len(leases):
            return [OK] * len(leases)
        return [self.status(o, lease, outdated_is_ok) for o, lease in zip(outcomes, leases, strict=True)]

    def status(self, outcome: Outcome, lease: Lease, outdated_is_ok: bool = False) -> status_pb2.Status:
        """The status of one item's outcome."""
        if outcome is Outcome.ACCEPTED or (outcome is Outcome.OUTDATED and outdated_is_ok):
            return OK
        return self.rejected(_error(outcome, lease))


def _error(outcome: Outcome, lease: Lease) -> SlipstreamError:
    facts: dict[str, Any] = {"draw": lease.draw, "sample": lease.sample, "attempt": lease.attempt}
    name = f"draw {lease.draw} sample {lease.sample} attempt {lease.attempt}"
    match outcome:
        case Outcome.OUTDATED:
            return Fenced(f"{name}: the sample is closed; stop working on it", "CLOSED", **facts)
        case Outcome.FENCED:
            return Fenced(f"{name}: granted again, or given back; stop working on it", "FENCED", **facts)
        case Outcome.CONFLICT:
            return Conflict(f"{name}: was submitted with another body", "OTHER_BODY", **facts)
        case _:
            return InvalidInput(f"{name}: was never granted", "NEVER_GRANTED", **facts)


def to_lease(wire: sample_pb2.Lease) -> Lease:
    """A lease as the ledger knows it."""
    sample = wire.sample
    return Lease(sample.draw.number, sample.index, wire.attempt, sample.draw.ledger_epoch or 1)


def from_lease(wire: sample_pb2.Lease, lease: Lease) -> None:
    """Fill a lease message."""
    wire.attempt = lease.attempt
    sample = wire.sample
    sample.index = lease.sample
    sample.draw.number, sample.draw.ledger_epoch = lease.draw, lease.epoch


def to_version(v: Version) -> policy_pb2.PolicyVersion:
    return policy_pb2.PolicyVersion(
        number=v.number, step=v.step, incarnation=v.incarnation, manifest_key=v.manifest_key, manifest_crc32c=v.manifest_crc32c)


def require(condition: bool, field: str, value: object, remedy: str) -> None:
    """Raise InvalidInput naming a field of a request."""
    if not condition:
        raise InvalidInput(f"{field} = {value!r}: {remedy}", "BAD_FIELD", field=field, value=value)


async def forever(interval_s: float, work: Callable[[], Any], sleep: Callable[[float], Any]) -> None:
    """Call `work()` again and again; a ledger that is away is the next call's problem, not the end of the process."""
    while True:
        try:
            await work()
        except SlipstreamError as error:
            if error.reason == "LEDGER_SCHEMA":  # callers were told to ask another front; starting this one again is of no use
                raise ConfigError(error.message, error.reason) from error
            if error.reason not in ("REDIS", "REDIS_FULL", "LEDGER_EMPTY"):
                raise
        await sleep(interval_s)


async def shielded(work: Any) -> Any:
    """Finish what was begun although the caller went away: a half-done step would be redone by the next one."""
    return await asyncio.shield(asyncio.ensure_future(work))
