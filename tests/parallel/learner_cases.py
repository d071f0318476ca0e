"""The learner on the ranks of a world, for comparison with one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist

from services.trainer.parallel import mesh
from services.trainer.parallel.learner import ShardedLearner
from slipstream import config
from slipstream.manifest import RawTensor
from tests.trainer_samples import CHARS, FAMILIES, groups, run_file

ROWS = dict(learning_rate=1e-3, tokens_per_microbatch=48)


def run(family: str, parallel: dict[str, Any]) -> config.RunFile:
    """With a head of keys and values for each of two tensor-parallel ranks."""
    build = {"model_type": family, "tokenizer_chars": CHARS, "config": FAMILIES[family] | {"num_key_value_heads": 2}}
    return run_file(family=family, model={"build": build}, trainer=ROWS | {"parallel": parallel})


def steps(family: str, parallel: dict[str, Any], count: int = 2) -> dict[str, Any]:
    """On a rank: gradients of the first step, metrics, weights and a snapshot after `count` of them, and after a reload."""
    learner = ShardedLearner(run(family, parallel))
    return trained(learner, count) | {"again": resumed(learner)}


def trained(learner: Any, count: int = 2) -> dict[str, Any]:
    """Of any learner."""
    gradients: dict[str, np.ndarray] = {}
    passes: list[int] = []
    counting = learner.model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))

    def look(*_: Any) -> None:
        if not gradients:
            for name, parameter in learner.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = mesh.whole(parameter.grad).detach().clone().numpy()

    handle = learner.optimizer.register_step_pre_hook(look)
    metrics = [learner.step(groups(5, seed=number), number) for number in range(1, count + 1)]
    handle.remove()
    counting.remove()
    return {"passes": len(passes), "gradients": gradients, "metrics": metrics, "weights": arrays(learner.weights())}


def resumed(learner: ShardedLearner) -> bool:
    """A snapshot put back gives the same weights after one more step as going on does."""
    snapshot = learner.snapshot()
    learner.step(groups(5, seed=9), 3)
    first = arrays(learner.weights())
    learner.load(snapshot)
    learner.step(groups(5, seed=9), 3)
    second = arrays(learner.weights())
    return dist.get_rank() != 0 or all(np.array_equal(first[name], second[name]) for name in first)


def halves() -> dict[str, Any]:
    """On a rank: two steps in bfloat16 with float32 masters, a snapshot with them, and the same again after a reload."""
    base = run("qwen3_moe", dict(ranks=2, experts=2, exchange="flat"))
    learner = ShardedLearner(base.model_copy(update={"model": base.model.model_copy(update={"dtype": "bfloat16"})}))
    metrics = [learner.step(groups(5, seed=number), number) for number in (1, 2)]
    masters = [name for name in learner.snapshot().optimizer if name.endswith("/master")]
    snapshot = learner.snapshot()
    learner.step(groups(5, seed=9), 3)
    first = {t.name: bytes(t.data) for t in learner.weights()}
    learner.load(snapshot)
    learner.step(groups(5, seed=9), 3)
    return {"metrics": metrics, "masters": len(masters), "again": first == {t.name: bytes(t.data) for t in learner.weights()}}


def arrays(tensors: list[RawTensor]) -> dict[str, np.ndarray]:
    """By name, as float32."""
    return {t.name: np.frombuffer(t.data, np.float32).reshape(t.shape).copy() for t in tensors}


def world(jobs: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several runs of `steps`, one after the other, on the same ranks."""
    torch.manual_seed(0)
    return [steps(family, parallel) for family, parallel in jobs]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Gradients of the first step to 1e-6 of their largest, metrics, and the weights after two steps."""
    assert set(found["gradients"]) == set(expected["gradients"])
    for name, value in expected["gradients"].items():
        tolerance = 1e-6 * max(1, np.abs(value).max())
        np.testing.assert_allclose(found["gradients"][name], value, rtol=0, atol=tolerance, err_msg=name)
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        for name in ("loss", "grad_norm", "entropy", "gap_mean", "trained_tokens", "reward_mean", "tokens"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    assert list(found["weights"]) == list(expected["weights"])
    for name, value in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], value, rtol=0, atol=1e-5, err_msg=name)
