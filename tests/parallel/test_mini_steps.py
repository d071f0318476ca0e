"""Several optimizer steps on a batch on two ranks are those of one process: the split, denominators, anchor and routes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from services.trainer.learner import Learner
from tests.parallel import mini_step_cases, ranks


@cache
def many() -> list[dict[str, Any]]:
    return ranks.run(2, mini_step_cases.world, dict(ranks=2, experts=2, exchange="flat"), timeout_s=100)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", mini_step_cases.JOBS)
def test_mini_steps_on_two_ranks_are_those_of_one(name: str) -> None:
    """Rows are shared out once a batch, and every rank takes its part of each mini-batch: weights and figures are those of
    one process, and a snapshot put back goes on to the bit."""
    expected, found = mini_step_cases.trained(Learner(mini_step_cases.run(name, {}))), many()[0][name]
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert one["mini_steps"] == other["mini_steps"] > 1
        for figure in ("loss", "grad_norm", "entropy", "gap_mean", "k3", "k3_last", "clip_share", "clip_share_last",
                       "trained_tokens", "expert_load_max", "balance_loss", "route_flip_share"):
            if (value := other.get(figure)) is not None:
                assert one[figure] == pytest.approx(value, rel=1e-4, abs=1e-5), figure
    for key, value in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][key], value, rtol=0, atol=2e-5, err_msg=key)
    assert all(result[name]["again"] for result in many())
