"""Autoscaling reads its signals as it will on a cluster: the charts' own queries, asked of a real Prometheus that scrapes live
metrics.

    helm template → ScaledObject ─ query ─► Prometheus ─ scrape ─► /metrics of a buffer ◄─ Gauges ◄─ ledger of a fleet
                        └ threshold, behaviour ─► the HPA, simulated ─► workers of that fleet

The fleet lives in virtual time (benchmarks/autoscaling.py); each time KEDA polls, the virtual clock stands still until
Prometheus has scraped what the buffer's gauges say then. What is judged is the same as without Prometheus: it settles, and the
trainer works. A query with its sign turned round is found by the same judge.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.autoscaling import SCENES, Autoscaler, ScaledFleet, Weather, settled, turns
from benchmarks.autoscaling_scores import SCORED, ScoredFleet
from services.buffer.front import Front
from services.buffer.gauges import Gauges
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.signals import wanted_samples
from slipstream import telemetry
from slipstream.config import parse
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.objects import open_store
from slipstream.service import ServiceContext
from slipstream.service_command import ServiceArguments
from tests.monitoring import prometheus
from tests.monitoring.test_autoscaling import complaints

INTERVAL = "100ms"
TURNED, SCORES = "turned round", "scores are slow"
SCORE_MS, REWARD_BATCH = 200, 32


class LiveBuffer:
    """The gauges of a buffer over a fleet's ledger, served as the service serves them."""

    def __init__(self, run: str, fleet: ScaledFleet, store: Any, folder: Path) -> None:
        scene = fleet.scene
        self.ledger = MemoryLedger(scene.rules, lambda: fleet.now)
        self.registry, clock = CollectorRegistry(), SystemClock()
        settings = parse({
            "run": {"name": run, "folder": str(folder)}, "model": {"path": "model"},
            "environments": [{"name": "e", "entry": "slipstream.environments.sort_digits:SortDigits"}]})
        context = ServiceContext(
            ServiceArguments(settings, "buffer", "buffer", ""), Lifecycle(clock), clock, store, registry=self.registry)
        self._gauges = Gauges(Front(self.ledger, telemetry.BufferMetrics(self.registry)), context)
        self.address = telemetry.serve(self.registry)

    async def show(self) -> float:
        """Bring the gauges up to date; when that was, in seconds since 1970."""
        await self._gauges.update()
        return time.time()


class Asked:
    """A query of one run, asked once the gauges of now are scraped."""

    def __init__(self, run: str, query: str) -> None:
        self.run, self.query = run, query
        self.server: prometheus.Prometheus
        self.answers = 0

    async def answer(self, buffer: LiveBuffer) -> float | None:
        shown = await buffer.show()
        scraped = f'timestamp(slipstream_buffer_wanted_samples{{run="{self.run}"}})'
        while ((await asyncio.to_thread(self.server.keda, scraped)) or 0) <= shown:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # another process: nothing tells
        found = await asyncio.to_thread(self.server.keda, self.query)
        self.answers += found is not None  # a scrape that came too late on a busy machine: the replicas stay for once
        return found


class QueriedFleet(ScaledFleet):
    """Rollout workers, scaled by what Prometheus answers. `most`: turn the answer round, from this down."""

    buffer: LiveBuffer
    asked: Asked
    most: float | None = None

    async def metric(self) -> float | None:
        found = await self.asked.answer(self.buffer)
        return found if found is None or self.most is None else self.most - found


class QueriedScores(ScoredFleet):
    """Reward workers, likewise."""

    buffer: LiveBuffer
    asked: Asked

    async def backlog(self) -> float | None:
        return await self.asked.answer(self.buffer)


def fleets() -> dict[str, QueriedFleet | QueriedScores]:
    """Every scene of benchmarks/autoscaling on the rendered charts; the first thing that tells a signal with the wrong sign."""
    made: dict[str, QueriedFleet | QueriedScores] = {}
    paused = "the trainer is paused for 20 minutes"
    for name, (scene, weather) in {**SCENES, TURNED: SCENES[paused]}.items():
        made[name] = _rollouts(name, scene, weather)
    scene = SCENES[paused][0]
    made[TURNED].most = (scene.max_lag + 1) * scene.groups_per_batch * scene.group_size  # type: ignore[union-attr]
    chart = prometheus.scaled_object("reward", SCORES.replace(" ", "-"), f"autoscaling.perReplica={REWARD_BATCH}")
    scores = QueriedScores(SCORED, Autoscaler.of_scaled_object(chart), SCORE_MS, REWARD_BATCH)
    scores.asked = Asked(SCORES.replace(" ", "-"), prometheus.queries(chart)["backlog"])
    return {**made, SCORES: scores}


def _rollouts(name: str, scene: Any, weather: Weather) -> QueriedFleet:
    run = name.replace(" ", "-")
    chart = prometheus.scaled_object("rollout", run, f"autoscaling.perReplica={scene.slots}")
    fleet = QueriedFleet(scene, Autoscaler.of_scaled_object(chart), weather, wanted_samples)
    fleet.asked = Asked(run, prometheus.queries(chart)["wanted-samples"])
    return fleet


@pytest.fixture(scope="module")
def outcomes(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """All scenes at once, each a run of its own in one Prometheus."""
    folder = tmp_path_factory.mktemp("keda")

    async def play() -> dict[str, dict[str, Any]]:
        made = fleets()
        async with open_store(f"file://{folder / 'objects'}") as store:
            targets = {}
            for fleet in made.values():
                fleet.buffer = LiveBuffer(fleet.asked.run, fleet, store, folder / fleet.asked.run)
                targets[fleet.buffer.address] = prometheus.labels("buffer", fleet.asked.run, "buffer-0")
            with prometheus.scraping(programs, folder, targets, INTERVAL) as server:
                for fleet in made.values():
                    fleet.asked.server = server
                found = await asyncio.gather(*(settled(fleet, fleet.buffer.ledger) for fleet in made.values()))
        for fleet, figures in zip(made.values(), found, strict=True):
            figures["answers"] = fleet.asked.answers
            if isinstance(fleet, QueriedScores):
                figures["scored"] = fleet.scored
        return dict(zip(made, found, strict=True))

    yield asyncio.run(play())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCENES)
def test_the_fleet_settles_on_what_the_rendered_query_says(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    found = outcomes[name]
    assert found["answers"] == len(found["history"]) > 30
    assert not complaints(name, found), found["history"]
    assert found["lag_max"] <= SCENES[name][0].max_lag


@pytest.mark.timeout(300)
def test_a_query_turned_round_is_found(outcomes: dict[str, dict[str, Any]]) -> None:
    """A fleet that grows while the trainer is paused, and goes when work waits."""
    assert complaints("the trainer is paused for 20 minutes", outcomes[TURNED])


@pytest.mark.timeout(300)
def test_reward_workers_follow_their_backlog(outcomes: dict[str, dict[str, Any]]) -> None:
    """A step every 5 s takes 64 scores of 200 ms: 2.6 workers. Soon there are two to four; the trainer does not wait."""
    found = outcomes[SCORES]
    assert max(replicas for _, replicas, _ in found["scored"]) <= 6, found["scored"]
    later = [(minute, replicas, metric) for minute, replicas, metric in found["scored"] if minute > 9]
    counts = [replicas for _, replicas, _ in later]
    assert 2 <= min(counts) <= max(counts) <= 4, later
    assert turns(later) <= later[-1][0] / 5, later
    assert found["idle_trainer"] < 0.15, found["idle_trainer"]


def test_the_autoscaler_has_the_values_of_the_chart() -> None:
    """Both ways to it, from values.yaml and from the rendered ScaledObject, say the same."""
    assert dataclasses.asdict(Autoscaler.of_chart()) == dataclasses.asdict(
        Autoscaler.of_scaled_object(prometheus.scaled_object("rollout", "demo")))
