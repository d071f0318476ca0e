"""Does the fleet settle? KEDA and the HPA, simulated in virtual time, on the buffer's own signal and a real ledger.

    python -m benchmarks.autoscaling [--json FILE]

The signal is `wanted_samples` (services/buffer/signals.py), thresholds and behaviour are those of helm/rollout/values.yaml.
tests/monitoring/test_keda.py runs the same scenes on the query and the numbers of the rendered ScaledObject, answered by a real
Prometheus.
Scenes: generation slow, generation fast, a trainer that is paused for a while (workers are parked), half of the fleet gone at
once (a Spot storm). Printed for each: replicas over time, how often the count turned round, the trainer's idle share.

Simulated: the HPA's ratio with its tolerance of 10 %, stabilisation windows and rates of change, the polling interval, a minute
until a new engine serves. Left out: failures to scrape (the charts keep the replicas then) and capacity that is not there.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.selection import Fleet, Scene, Worker
from services.buffer.ledger import Balance, Ledger, Rules
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.signals import wanted_samples

TOLERANCE = 0.1  # the HPA's own: within it nothing changes
START_MS = 60_000  # until a new engine has its weights
VALUES = Path(__file__).parent.parent / "helm" / "rollout" / "values.yaml"
Signal = Callable[[Rules, Balance], int]


@dataclass
class Autoscaler:
    """The replica count that KEDA's ScaledObject and the HPA behind it ask for. Times in milliseconds."""

    least: int
    most: int
    per_replica: int
    polling_ms: int
    up_percent: int
    up_pods: int
    down_percent: int
    down_window_ms: int

    def __post_init__(self) -> None:
        self._asked: deque[tuple[float, int]] = deque()  # of the window: when, how many
        self._had: deque[tuple[float, int]] = deque()  # replicas within the last minute

    @classmethod
    def of_chart(cls, **changes: int) -> Autoscaler:
        """With the values that helm/rollout has by default."""
        auto = yaml.safe_load(VALUES.read_text())["autoscaling"]
        up, down = auto["scaleUp"], auto["scaleDown"]
        assert up["stabilizationSeconds"] == 0
        return dataclasses.replace(cls(
            auto["minReplicas"], auto["maxReplicas"], auto["perReplica"], 1000 * auto["pollingSeconds"], up["percent"],
            up["pods"], down["percent"], 1000 * down["stabilizationSeconds"]), **changes)

    @classmethod
    def of_scaled_object(cls, scaled: dict[str, Any]) -> Autoscaler:
        """With what a chart's ScaledObject of one trigger says."""
        spec = scaled["spec"]
        [trigger] = spec["triggers"]
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        up, down = behavior["scaleUp"], behavior["scaleDown"]
        rates = {p["type"]: p["value"] for p in up["policies"]}
        [slow] = down["policies"]
        assert up["stabilizationWindowSeconds"] == 0 and slow["type"] == "Percent" and trigger["metricType"] == "AverageValue"
        assert {p["periodSeconds"] for p in (*up["policies"], slow)} == {60}
        return cls(
            spec["minReplicaCount"], spec["maxReplicaCount"], int(trigger["metadata"]["threshold"]),
            1000 * spec["pollingInterval"], rates["Percent"], rates["Pods"], slow["value"],
            1000 * down["stabilizationWindowSeconds"])

    def replicas(self, now: float, current: int, metric: float) -> int:
        """The next count, from a metric of which each replica should have `per_replica`."""
        ratio = metric / (current * self.per_replica) if current else math.inf
        wanted = current if abs(ratio - 1) <= TOLERANCE else math.ceil(metric / self.per_replica)
        wanted = min(self.most, max(self.least, wanted))
        self._asked.append((now, wanted))
        self._had.append((now, current))
        for queue, age in ((self._asked, self.down_window_ms), (self._had, 60_000)):
            while queue[0][0] < now - age:
                queue.popleft()
        if wanted > current:
            before = min(count for _, count in self._had)
            return min(wanted, max(before + self.up_pods, math.ceil(before * (1 + self.up_percent / 100))))
        stable = min(current, max(count for _, count in self._asked))
        before = max(count for _, count in self._had)
        return max(stable, math.floor(before * (1 - self.down_percent / 100)))


@dataclass(frozen=True)
class Weather:
    """What happens meanwhile. Times after the start, in milliseconds."""

    paused: tuple[int, int] = (0, 0)  # the trainer does nothing
    storm: int = 0  # half of the engines go at once; 0 = never


class ScaledFleet(Fleet):
    """A fleet whose workers come and go as the autoscaler says."""

    def __init__(self, scene: Scene, scaler: Autoscaler, weather: Weather, signal: Signal) -> None:
        super().__init__(scene)
        self.scaler, self.weather, self.signal = scaler, weather, signal
        self.history: list[tuple[float, int, float]] = []  # minutes, replicas, signal
        self._begun = 0.0
        self._spawned = len(self.workers)

    async def _number(self, incarnation: int) -> None:
        if not self._begun:
            self._begun = self.now
            self._at(0, self._scale)
            if self.weather.storm:
                self._at(self.weather.storm, self._storm)
        first, last = (self._begun + t for t in self.weather.paused)
        if first <= self.now < last:
            async def again() -> None:
                self._changed.add("ready")

            return self._at(last - self.now, again)
        await super()._number(incarnation)

    async def _scale(self) -> None:
        self._at(self.scaler.polling_ms, self._scale)
        if (metric := await self.metric()) is None:
            return
        target = self.scaler.replicas(self.now, len(self.workers), metric)
        self.history.append(((self.now - self._begun) / 60_000, target, metric))
        while len(self.workers) < target:
            self._start()
        for worker in self.workers[target:]:  # drained: what it has goes back at once
            await self.ledger.release_samples([flight.lease for flight in worker.flights.values()])
            self._end_of(worker)

    async def metric(self) -> float | None:
        """What the autoscaler reads; None: nothing answers, and the replicas stay as they are."""
        return self.signal(self.ledger.rules, await self.ledger.balance())

    def _start(self) -> None:
        worker = Worker(f"w{self._spawned}", 1.0, alive=False)
        self._spawned += 1
        self.workers.append(worker)
        self._at(START_MS, lambda: self._restart(worker))
        self._at(self.scene.lease_ms / 2, lambda: self._heartbeat(worker))

    async def _restart(self, worker: Worker) -> None:
        if worker in self.workers:
            await super()._restart(worker)

    async def _heartbeat(self, worker: Worker) -> None:
        if worker in self.workers:
            await super()._heartbeat(worker)

    def _end_of(self, worker: Worker) -> None:
        worker.alive, worker.life = False, worker.life + 1
        worker.flights.clear()
        self.workers.remove(worker)
        self._changed.add("samples")

    async def _storm(self) -> None:
        """Nothing is handed back; the Deployment starts as many again."""
        gone = self.workers[: len(self.workers) // 2]
        for worker in gone:
            self._end_of(worker)
        for _ in gone:
            self._start()


SCENE = Scene(
    samples=12_000, groups_per_batch=8, group_size=8, max_lag=3, workers=1, slots=16, slowest=1, shape=2.0, longest=320,
    step_ms=5000, token_ms=60, kill_every_ms=10**12)
SCENES: dict[str, tuple[Scene, Weather]] = {
    "generation is slow": (dataclasses.replace(SCENE, token_ms=150, samples=8000), Weather()),
    "generation is fast": (dataclasses.replace(SCENE, token_ms=6), Weather()),
    "the trainer is paused for 20 minutes": (SCENE, Weather(paused=(600_000, 1_800_000))),
    "half of the fleet goes at once": (SCENE, Weather(storm=600_000)),
}


def turns(history: list[tuple[float, int, float]]) -> int:
    """How often the replica count turned round: up after down, or down after up."""
    steps = [b - a for (_, a, _), (_, b, _) in itertools.pairwise(history) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


async def simulate(scene: Scene, weather: Weather, signal: Signal = wanted_samples) -> dict[str, Any]:
    """One scene; `perReplica` is what one engine of the scene holds."""
    fleet = ScaledFleet(scene, Autoscaler.of_chart(per_replica=scene.slots), weather, signal)
    return await settled(fleet)


async def settled(fleet: ScaledFleet, ledger: Ledger | None = None) -> dict[str, Any]:
    """The figures of a fleet, run to its end on a ledger of its own."""
    figures = await fleet.run(ledger or MemoryLedger(fleet.scene.rules, lambda: fleet.now))
    return {**figures, "turns": turns(fleet.history), "history": fleet.history,
            "replicas": fleet.history[-1][1], "most_replicas": max(r for _, r, _ in fleet.history)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    found = {}
    for name, (scene, weather) in SCENES.items():
        f = found[name] = asyncio.run(simulate(scene, weather))
        by_minute = {int(minute): replicas for minute, replicas, _ in f["history"]}
        print(f"{name}: {f['turns']} turns, at most {f['most_replicas']} replicas, trainer idle {f['idle_trainer']:.0%}, "
              f"lag at most {f['lag_max']}, {f['hours']:.2f} virtual hours\n  replicas by minute {list(by_minute.values())}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
