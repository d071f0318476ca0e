"""Are long answers trained as often as they are drawn? A fleet in virtual time, on a real ledger.

    python -m benchmarks.selection --json benchmarks/results/selection.json

Answer lengths follow a Pareto law, one worker is 50 times slower than the others, workers are killed all the time. The run
ends when every batch is trained, so that drawn = trained + dropped by name. Printed for each over-lag policy: the distance of
Kolmogorov and Smirnov between the lengths of drawn and of trained samples, by samples and by tokens (the latter sees the tail),
the share of the longest percent that was trained, what was dropped and why, and the idle share of trainer and workers.

The ledger is the real one, with the clock that its tests hand in; nothing sleeps, so an hour takes a second.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import heapq
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.buffer.ledger import Grant, Lease, Ledger, Rules, Submit, Version
from services.buffer.memory_ledger import MemoryLedger

POLICIES = ("wait", "mask", "drop")


@dataclass(frozen=True)
class Scene:
    """What happens to the fleet. Times in virtual milliseconds."""

    policy: str = "wait"
    samples: int = 10_000
    groups_per_batch: int = 8
    group_size: int = 8
    max_lag: int = 2
    workers: int = 12
    slots: int = 32
    slowest: float = 50.0  # one worker takes this many times as long as the others
    shortest: int = 64  # tokens; Pareto with this scale
    shape: float = 1.1
    longest: int = 16_384
    token_ms: float = 20.0
    step_ms: int = 10_000
    kill_every_ms: int = 60_000  # somewhere in the fleet
    restart_ms: int = 5_000
    lease_ms: int = 60_000
    max_attempts: int = 8
    seed: int = 1

    @property
    def rules(self) -> Rules:
        steps = -(-self.samples // (self.groups_per_batch * self.group_size))
        return Rules(
            run="selection", seed=self.seed, steps=steps, groups_per_batch=self.groups_per_batch, group_size=self.group_size,
            max_lag=self.max_lag, pinned=False, lease_ms=self.lease_ms, scoring_lease_ms=self.lease_ms,
            max_attempts=self.max_attempts, group_timeout_ms=0, quota_bytes=1 << 30, sample_bytes=64, keep_versions=4,
            over_lag={"e": self.policy}, weights={"e": 1.0})

    def length(self, draw: int, index: int) -> int:
        """Tokens of a sample's answer: its own, whoever generates it and however often."""
        u = random.Random(f"{self.seed}/{draw}/{index}").random()
        return min(self.longest, int(self.shortest * (1 - u) ** (-1 / self.shape)))


@dataclass
class Flight:
    """One sample in a worker's slot. `steps` are those that were loaded while it was generated."""

    lease: Lease
    steps: list[tuple[int, int]]


@dataclass
class Worker:
    name: str
    slowness: float
    life: int = 0  # of the process: what a former one began is lost
    alive: bool = True
    idle_ms: float = 0.0
    loaded: Version | None = None
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)


class Fleet:
    """Workers and a trainer around a ledger. Left out: scoring (the environment scores at once), the wire, loading times.

    Everything that a worker finishes is submitted at once; whoever has a free slot asks whenever the ledger says that
    something became possible, as the long polls do.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene, self.now = scene, 1_000_000
        self.ledger: Ledger
        self.random = random.Random(scene.seed)
        self.workers = [Worker(f"w{n}", scene.slowest if n == 0 else 1.0) for n in range(scene.workers)]
        self.trained: list[int] = []
        self.lag_max = self.batch = self.kills = 0
        self.trainer_busy_ms = 0
        self._version: Version | None = None
        self._events: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self._count, self._training, self._changed = 0, False, {"samples", "ready"}
        self._idle_since: dict[str, float] = {}

    async def run(self, ledger: Ledger) -> dict[str, Any]:
        """Until every batch is trained; the figures."""
        scene, self.ledger = self.scene, ledger
        ledger.on_change = lambda topics: self._changed.update(topics)
        await ledger.open({"e": 0})
        incarnation = (await ledger.take_incarnation(0, 0)).incarnation
        await self._publish(0, incarnation)
        started = self.now = self.now + 2 * scene.lease_ms  # past the grace of the start
        self._at(self._gap(), self._kill)
        for worker in self.workers:
            self._at(scene.lease_ms / 2, lambda w=worker: self._heartbeat(w))
        while self.batch < ledger.rules.steps or self._training:
            await self._settle(incarnation)
            if self.batch >= ledger.rules.steps and not self._training:
                break
            self._pass_to_next()
            _, _, event = heapq.heappop(self._events)
            await event()
        return await self._figures(self.now - started)

    def _at(self, after_ms: float, event: Callable[[], Awaitable[None]]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after_ms, self._count, event))

    def _pass_to_next(self) -> None:
        then = int(np.ceil(self._events[0][0]))
        for worker in self.workers:
            if worker.alive:
                worker.idle_ms += (then - self.now) * (self.scene.slots - len(worker.flights))
        self.now = then

    async def _settle(self, incarnation: int) -> None:
        """Everybody who waits for the ledger looks again, until nothing more is possible."""
        while self._changed:
            changed, self._changed = self._changed, set()
            if "samples" in changed:
                for worker in self.random.sample(self.workers, len(self.workers)):
                    await self._lease(worker)
            if "ready" in changed and not self._training and self.batch < self.ledger.rules.steps:
                await self._number(incarnation)

    async def _publish(self, step: int, incarnation: int) -> None:
        number = await self.ledger.reserve_version(incarnation, step)
        self._version = Version(number, step, incarnation, f"versions/{number}", 0)
        await self.ledger.publish_version(self._version)
        for worker in self.workers:
            for flight in worker.flights.values():
                flight.steps.append((step, incarnation))
            worker.loaded = self._version

    # workers

    async def _lease(self, worker: Worker) -> None:
        free = self.scene.slots - len(worker.flights)
        if not (worker.alive and free and worker.loaded):
            return
        granted = await self.ledger.grant_samples(worker.name, free, worker.loaded.number)
        for grant in granted.grants:
            self._begin(worker, grant)

    def _begin(self, worker: Worker, grant: Grant) -> None:
        assert worker.loaded and worker.loaded.step >= grant.min_step
        key, scene = (grant.lease.draw, grant.lease.sample), self.scene
        flight = worker.flights[key] = Flight(grant.lease, [(worker.loaded.step, worker.loaded.incarnation)])
        self._at(scene.length(*key) * scene.token_ms * worker.slowness, lambda: self._end(worker, worker.life, key, flight))

    async def _end(self, worker: Worker, life: int, key: tuple[int, int], flight: Flight) -> None:
        if worker.life != life or worker.flights.get(key) is not flight:
            return  # killed, or lost to another meanwhile
        del worker.flights[key]
        length = self.scene.length(*key)
        await self.ledger.submit_samples([Submit(flight.lease, b"body", 1, length, length, flight.steps, score=b"1")])
        self._changed.add("samples")  # a slot is free

    async def _heartbeat(self, worker: Worker) -> None:
        self._at(self.scene.lease_ms / 2, lambda: self._heartbeat(worker))
        flights = list(worker.flights.items())
        if not flights:
            return
        outcomes = await self.ledger.heartbeat_samples([flight.lease for _, flight in flights])
        for (key, _), outcome in zip(flights, outcomes, strict=True):
            if outcome != "accepted":
                del worker.flights[key]
                self._changed.add("samples")
        await self._lease(worker)  # what lapsed elsewhere, as the slow poll finds it

    def _gap(self) -> float:
        return self.random.expovariate(1 / self.scene.kill_every_ms)

    async def _kill(self) -> None:
        """SIGKILL: nothing is handed back; what was in flight is found again when its leases lapse."""
        worker = self.random.choice(self.workers)
        self._at(self._gap(), self._kill)
        if worker.alive:
            self.kills += 1
            worker.alive, worker.life = False, worker.life + 1
            worker.flights.clear()
            self._at(self.scene.restart_ms, lambda: self._restart(worker))

    async def _restart(self, worker: Worker) -> None:
        worker.alive, worker.loaded = True, self._version
        self._changed.add("samples")

    # trainer

    async def _number(self, incarnation: int) -> None:
        numbering = await self.ledger.number_batch(incarnation, self.batch + 1)
        if numbering.numbered:
            self._training = True
            self.batch += 1
            composition = await self.ledger.read_batch(self.batch)
            for group in composition.groups:
                self.lag_max = max(self.lag_max, group.lag)
                self.trained += [self.scene.length(group.draw, member.index) for member in group.members]
            self.trainer_busy_ms += self.scene.step_ms
            self._at(self.scene.step_ms, lambda: self._trained(incarnation))

    async def _trained(self, incarnation: int) -> None:
        self._training = False
        await self._publish(self.batch, incarnation)
        await self.ledger.commit(incarnation, self.batch)
        await self.ledger.trim(await self.ledger.archive())
        self._changed.update(("samples", "ready"))

    async def _figures(self, elapsed_ms: int) -> dict[str, Any]:
        balance, scene = await self.ledger.balance(), self.scene
        balance.check(scene.group_size)
        draws = balance.meta["next_draw"]
        drawn = np.array([scene.length(d, i) for d in range(draws) for i in range(scene.group_size)])
        trained, tail = np.array(self.trained), np.quantile(drawn, 0.99)
        return {
            "policy": scene.policy, "drawn": len(drawn), "trained": len(trained), "ks": distance(drawn, trained),
            "ks_tokens": distance(drawn, trained, by_tokens=True),
            "mean_drawn": float(drawn.mean()), "mean_trained": float(trained.mean()),
            "longest_percent_trained": float((trained >= tail).sum() / (drawn >= tail).sum()),
            "dropped": {reason: count for reason, count in balance.dropped.items() if count},
            "failed_samples": balance.samples.get("closed", 0), "lag_max": self.lag_max, "kills": self.kills,
            "repeated_grants": balance.meta.get("expired", 0), "hours": elapsed_ms / 3.6e6,
            "idle_trainer": 1 - self.trainer_busy_ms / elapsed_ms,
            "idle_workers": sum(w.idle_ms for w in self.workers) / (elapsed_ms * scene.workers * scene.slots)}


def distance(a: np.ndarray, b: np.ndarray, by_tokens: bool = False) -> float:
    """Two-sample Kolmogorov-Smirnov statistic of lengths [N], [M]: the largest gap between their distribution functions.

    `by_tokens` weighs each sample with its length: the distribution of the length of the answer that a token belongs to.
    """
    points = np.union1d(a, b)

    def below(lengths: np.ndarray) -> np.ndarray:
        weights = np.bincount(np.searchsorted(points, lengths), lengths if by_tokens else None, len(points))
        return np.cumsum(weights) / weights.sum()

    return float(np.abs(below(a) - below(b)).max())


async def simulate(scene: Scene) -> dict[str, Any]:
    """A scene on the in-memory ledger."""
    fleet = Fleet(scene)
    return await fleet.run(MemoryLedger(scene.rules, lambda: fleet.now))


def sentence(figures: dict[str, Any]) -> str:
    """One policy's figures as a line."""
    f = figures
    return (
        f"{f['policy']:5} ks {f['ks']:.4f}, by tokens {f['ks_tokens']:.4f}; mean length {f['mean_drawn']:.0f} drawn, "
        f"{f['mean_trained']:.0f} trained; longest percent trained {f['longest_percent_trained']:.0%}; "
        f"dropped {f['dropped'] or 0}, failed samples {f['failed_samples']}; lag at most {f['lag_max']}; {f['kills']} kills, "
        f"{f['repeated_grants']} repeated grants; "
        f"idle: trainer {f['idle_trainer']:.0%}, workers {f['idle_workers']:.0%}; {f['hours']:.1f} virtual hours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--samples", type=int, default=Scene.samples)
    arguments = parser.parse_args()
    found = []
    for policy in POLICIES:
        found.append(asyncio.run(simulate(dataclasses.replace(Scene(), policy=policy, samples=arguments.samples))))
        print(sentence(found[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
