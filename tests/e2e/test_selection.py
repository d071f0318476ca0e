"""No selection bias: what is trained is as long as what was drawn, whoever dies, stalls or dawdles.

A fleet of benchmarks/selection.py in virtual time: Pareto lengths, one worker fifty times slower than the others, a kill a
minute. Every sample whose length is not trained was dropped by name, so the two sets can be compared to the last one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.selection import Fleet, Scene, distance, sentence, simulate
from services.buffer.connection import connect
from services.buffer.redis_ledger import RedisLedger
from tests.redis_server import RedisProcess

MOST_KS = 0.05


async def figures(scene: Scene, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Of a scene, told to whoever runs the test."""
    found = await simulate(scene)
    with capsys.disabled():
        print("\n" + sentence(found))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["wait", "mask"])
async def test_trained_lengths_are_drawn_lengths(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """10^4 samples: the distributions agree, by samples and by tokens; the longest percent is trained to the last one. `wait`
    pays with idle time, `mask` with lag: of a late group it trains the tokens within the bound."""
    found = await figures(Scene(policy=policy), capsys)
    assert found["drawn"] >= 10_000 and found["kills"] > 100
    assert found["ks"] <= MOST_KS and found["ks_tokens"] <= MOST_KS
    assert found["longest_percent_trained"] == 1 and not found["dropped"] and not found["failed_samples"]
    assert found["lag_max"] == 2 if policy == "wait" else found["lag_max"] > 2
    assert 0 < found["idle_trainer"] < 1 and 0 < found["idle_workers"] < 1


@pytest.mark.slow
async def test_the_bias_of_drop_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """`drop` is the fastest and trains what is short; the figures show it. Samples alone hardly would: long answers are few."""
    found = await figures(Scene(policy="drop"), capsys)
    assert found["dropped"].keys() == {"lag"} and found["lag_max"] == 2
    assert found["drawn"] == found["trained"] + found["dropped"]["lag"] * Scene.group_size
    assert found["mean_trained"] < 0.8 * found["mean_drawn"] and found["longest_percent_trained"] < 0.5
    assert found["ks_tokens"] > MOST_KS > found["ks"]


@pytest.mark.slow
async def test_redis_has_the_same_figures(redis: RedisProcess) -> None:
    """To the last digit, of a scene in which one group is a batch: there `wait` is hardest, for one late group has room."""
    scene = Scene(
        samples=200, groups_per_batch=1, group_size=2, workers=5, slots=4, kill_every_ms=30_000, lease_ms=20_000, step_ms=3_000,
        slowest=10, seed=13)
    client, fleet = connect(redis.url), Fleet(scene)
    found = await fleet.run(RedisLedger(client, scene.rules, lambda: fleet.now))
    await client.aclose()
    assert found == await simulate(scene)
    assert found["repeated_grants"] > 3 and not found["dropped"]


async def test_wait_drops_nobody_for_being_slow() -> None:
    """Batches of one to three groups, bounds of one to five steps, a kill every fifteen seconds: none is dropped for age."""
    for seed in range(3):
        for groups, size, lag in ((1, 2, 1), (1, 2, 2), (2, 2, 2), (2, 4, 3), (3, 2, 5)):
            scene = Scene(
                samples=150, groups_per_batch=groups, group_size=size, max_lag=lag, workers=5, slots=4, lease_ms=8_000,
                step_ms=3_000, kill_every_ms=15_000, max_attempts=99, seed=seed)
            found = await simulate(scene)
            assert not found["dropped"] and found["lag_max"] <= lag, dataclasses.astuple(scene)


def test_the_distance_is_that_of_kolmogorov_and_smirnov() -> None:
    """Golden values: equal, apart, a quarter of the samples that holds half of the tokens missing."""
    lengths = np.array([1, 1, 1, 3])
    assert distance(lengths, lengths) == 0 and distance(lengths, lengths + 9) == 1
    assert distance(lengths, lengths[:3]) == 0.25 and distance(lengths, lengths[:3], by_tokens=True) == 0.5
