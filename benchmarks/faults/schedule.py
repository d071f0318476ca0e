"""Which fault hits whom, when and for how long: from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PROCESSES = ("trainer", "rollout", "reward", "buffer", "supervisor", "redis")
LINKS = ("trainer", "rollout", "reward", "redis")  # whose connections lead through a proxy
LINK_FAULTS = {"reset": "resets", "lost reply": "lost replies", "delay": "delays"}
LINK_GAP_S = 2.5
KILLS = 15  # of each process, in ten minutes
ROUNDS_PER_MINUTE = 1.8  # each kills and stops every process once


@dataclass(frozen=True)
class Fault:
    """`action` is kill, stop, reset, lost reply or delay; `seconds` until a stopped or delayed one goes on; `after_s` the pause
    before it."""

    action: str
    target: str
    after_s: float
    seconds: float = 0.0


def process_faults(seed: int, lease_s: float, rounds_per_minute: float) -> Iterator[Fault]:
    """Endless rounds: in each, every process is killed once and stopped once, in random order.

    A stop is short, or longer than a lease: then its owner comes back as a zombie.
    """
    chance = random.Random(f"processes {seed}")
    deck = [(action, target) for action in ("kill", "stop") for target in PROCESSES]
    mean_s = 60 / rounds_per_minute / len(deck)
    while True:
        chance.shuffle(deck)
        for action, target in deck:
            after_s = min(chance.expovariate(1 / mean_s), 3 * mean_s)
            seconds = chance.uniform(0.3, 1.2) if chance.random() < 0.5 else chance.uniform(1.3, 4.0) * lease_s
            yield Fault(action, target, after_s, seconds if action == "stop" else 0.0)


def link_faults(seed: int) -> Iterator[Fault]:
    """Endless resets, lost replies and delays, each kind and each link equally often."""
    chance = random.Random(f"links {seed}")
    while True:
        deck = [(action, target) for action in LINK_FAULTS for target in LINKS]
        chance.shuffle(deck)
        for action, target in deck:
            seconds = chance.uniform(0.2, 3.0) if action == "delay" else 0.0
            yield Fault(action, target, chance.expovariate(1 / LINK_GAP_S), seconds)
