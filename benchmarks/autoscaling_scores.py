"""Reward workers that are scaled on their backlog, in the same virtual time as the fleet of benchmarks/autoscaling.py.

Samples come from a fixed number of rollout workers without a score. A reward worker takes up to `batch` of them and scores one
after the other. One that is scaled away takes no more and finishes what it has, as services/reward does.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field

from benchmarks.autoscaling import SCENE, START_MS, Autoscaler, ScaledFleet, Weather
from benchmarks.selection import Flight, Scene, Worker
from services.buffer.ledger import Lease, Scored, Submit
from services.buffer.signals import wanted_samples

ROLLOUTS = 8


@dataclass
class Scorer:
    """One reward worker."""

    name: str
    alive: bool = True
    in_hand: deque[Lease] = field(default_factory=deque)


class ScoredFleet(ScaledFleet):
    """`scaler` scales the reward workers; the rollout workers stay as many."""

    def __init__(self, scene: Scene, scaler: Autoscaler, score_ms: int, batch: int) -> None:
        fixed = dataclasses.replace(scaler, least=ROLLOUTS, most=ROLLOUTS, per_replica=scene.slots)
        super().__init__(dataclasses.replace(scene, workers=ROLLOUTS), fixed, Weather(), wanted_samples)
        self.rewards, self.score_ms, self.batch_size = scaler, score_ms, batch
        self.scorers = [Scorer("s0")]
        self.scored: list[tuple[float, int, float]] = []  # minutes, reward workers, signal
        self._named = 1

    async def backlog(self) -> float | None:
        """What the autoscaler of reward workers reads."""
        samples = (await self.ledger.balance()).samples
        return samples.get("unscored", 0) + samples.get("scoring", 0)

    async def _number(self, incarnation: int) -> None:
        first = not self._begun
        await super()._number(incarnation)
        if first:
            self._at(0, self._scale_scorers)

    async def _scale_scorers(self) -> None:
        self._at(self.rewards.polling_ms, self._scale_scorers)
        if (metric := await self.backlog()) is None:
            return
        target = self.rewards.replicas(self.now, len(self.scorers), metric)
        self.scored.append(((self.now - self._begun) / 60_000, target, metric))
        for _ in range(target - len(self.scorers)):
            scorer = Scorer(f"s{self._named}", alive=False)
            self._named += 1
            self.scorers.append(scorer)
            self._at(START_MS, lambda scorer=scorer: self._come(scorer))
        for scorer in self.scorers[target:]:
            scorer.alive = False
        del self.scorers[target:]

    async def _come(self, scorer: Scorer) -> None:
        if scorer in self.scorers:
            scorer.alive = True
            self._changed.add("unscored")

    async def _end(self, worker: Worker, life: int, key: tuple[int, int], flight: Flight) -> None:
        if worker.life == life and worker.flights.get(key) is flight:
            del worker.flights[key]
            length = self.scene.length(*key)
            await self.ledger.submit_samples(
                [Submit(flight.lease, b"body", 1, length, length, flight.steps, transcript=b"answer")])
            self._changed.add("samples")

    async def _settle(self, incarnation: int) -> None:
        while self._changed:
            if "unscored" in self._changed:
                for scorer in self.scorers:
                    await self._take(scorer)
            await super()._settle(incarnation)

    async def _take(self, scorer: Scorer) -> None:
        if scorer.alive and (room := self.batch_size - len(scorer.in_hand)) > 0:
            idle = not scorer.in_hand
            scorer.in_hand += [grant.lease for grant in await self.ledger.grant_scoring(scorer.name, room)]
            if idle and scorer.in_hand:
                self._at(self.score_ms, lambda: self._score(scorer))

    async def _score(self, scorer: Scorer) -> None:
        await self.ledger.submit_scores([Scored(scorer.in_hand.popleft(), b"1", 1.0)])
        if scorer.in_hand:
            self._at(self.score_ms, lambda: self._score(scorer))
        else:
            self._changed.add("unscored")


SCORED = dataclasses.replace(SCENE, token_ms=20, samples=12_000)
