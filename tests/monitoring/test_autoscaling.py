"""The fleet settles: with generation too slow or too fast, through a pause of the trainer and a Spot storm.

The signal is the buffer's, the numbers are the chart's; the HPA is simulated in virtual time. A signal with its sign turned
round must fail: a fleet that shrinks when work waits is what the simulation is there to find.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.autoscaling import SCENES, Signal, simulate
from services.buffer.signals import wanted_samples

FOUND: dict[str, dict[str, Any]] = {}
LEAST_IDLE = {"generation is fast": 0.05, "half of the fleet goes at once": 0.35}


def _found(name: str, signal: Signal = wanted_samples) -> dict[str, Any]:
    return asyncio.run(simulate(*SCENES[name], signal))


def complaints(name: str, found: dict[str, Any]) -> list[str]:
    complaints = []
    if found["turns"] > 2:
        complaints.append(f"the fleet flaps: {found['turns']} turns")
    if found["idle_trainer"] > LEAST_IDLE.get(name, 1):
        complaints.append(f"the trainer is idle {found['idle_trainer']:.0%} of the time")
    counts = [replicas for _, replicas, _ in found["history"]]
    if name == "the trainer is paused for 20 minutes":
        parked = [r for minute, r, _ in found["history"] if 25 < minute < 29.5]
        resumed = [r for minute, r, _ in found["history"] if minute > 34]
        if max(parked) > 1 or min(resumed) < 4:
            complaints.append(f"parked with {max(parked)} replicas, resumed with {min(resumed)}")
    elif min(counts[len(counts) // 4:]) < 2:
        complaints.append(f"work waits and the fleet has {min(counts)} replica")
    return complaints


@pytest.mark.parametrize("name", SCENES)
def test_the_fleet_settles(name: str) -> None:
    found = _found(name)
    assert not complaints(name, found), found["history"]
    assert found["lag_max"] <= SCENES[name][0].max_lag


@pytest.mark.timeout(60)
def test_a_signal_turned_round_is_found() -> None:
    """More work, fewer workers: the same judge complains."""
    most = SCENES["generation is fast"][0]
    bound = (most.max_lag + 1) * most.groups_per_batch * most.group_size
    name = "the trainer is paused for 20 minutes"
    assert complaints(name, _found(name, lambda rules, balance: bound - wanted_samples(rules, balance)))
