"""Ranks that share their devices with rollout workers: each moves its own shards away, and the steps are the same."""

from __future__ import annotations

import pytest

from tests.parallel import offload_cases, ranks


@pytest.mark.slow
@pytest.mark.nightly
def test_every_rank_leaves_its_device_with_its_shards() -> None:
    """Two ranks, FSDP2 x EP: away nothing but counters is left on the device, and weights, moments and what is published equal
    those of ranks that stayed, bit for bit."""
    for found in ranks.run(2, offload_cases.turns, "qwen3_moe", dict(ranks=2, experts=2, exchange="flat"), timeout_s=100):
        assert found["same"] and max(found["away"]) <= 4096 < found["whole"] < found["back"], found
