"""Several optimizer steps on a batch, on the ranks of a world, for comparison with one process."""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.learner import Learner
from services.trainer.parallel.learner import ShardedLearner
from slipstream import config
from tests.parallel.learner_cases import arrays, resumed
from tests.trainer_samples import CHARS, FAMILIES, groups, run_file

DECOUPLED = {"anchor": "recomputed", "correction": "truncated"}
# Name -> [algorithm] and minibatches, epochs.
JOBS: dict[str, tuple[dict[str, Any], int, int]] = {
    "own routes": ({"route_replay": "trainer", **DECOUPLED}, 2, 2),
    "sampler's anchor": ({"balance_coefficient": 0.1}, 3, 1),
}


def run(name: str, parallel: dict[str, Any]) -> config.RunFile:
    """Steps that move routers, five groups of which each has a signal."""
    algorithm, minibatches, epochs = JOBS[name]
    build = {"model_type": "qwen3_moe", "tokenizer_chars": CHARS, "config": FAMILIES["qwen3_moe"] | {"num_key_value_heads": 2}}
    trainer = {"learning_rate": 1e-3, "tokens_per_microbatch": 48, "minibatches": minibatches, "epochs": epochs}
    return run_file(
        model={"build": build}, algorithm=algorithm, schedule={"groups_per_batch": 5}, trainer=trainer | {"parallel": parallel})


def trained(learner: Learner) -> dict[str, Any]:
    """Metrics and weights of two batches."""
    metrics = [learner.step(groups(5, seed=number), number) for number in (1, 2)]
    return {"metrics": metrics, "weights": arrays(learner.weights())}


def world(parallel: dict[str, Any]) -> dict[str, Any]:
    """On a rank: every job, and whether a snapshot put back goes on the same."""
    torch.manual_seed(0)
    found = {}
    for name in JOBS:
        learner = ShardedLearner(run(name, parallel))
        found[name] = trained(learner) | {"again": resumed(learner)}
    return found
