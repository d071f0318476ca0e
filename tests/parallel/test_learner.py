"""The learner's step on many ranks is that of one: gradients, metrics, published weights, and a resume."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from services.trainer.learner import Learner
from services.trainer.parallel.partition import cost, partition
from slipstream.errors import ConfigError
from tests.parallel import learner_cases, ranks
from tests.trainer_samples import groups, run_file

MESHES = {
    2: [
        ("qwen3_moe", dict(ranks=2, experts=2, exchange="flat")),
        ("mixtral", dict(ranks=2, experts=2, exchange="flat", recompute=True)),
    ],
    4: [
        ("qwen3_moe", dict(ranks=4, experts=4, exchange="hierarchical", ranks_per_node=2)),
        ("qwen3_moe", dict(ranks=4, experts=2, exchange="flat")),
        ("qwen3_moe", dict(ranks=4, experts=2, tensor=2, exchange="flat")),
        ("mixtral", dict(ranks=4, experts=4, exchange="auto", ranks_per_node=2)),
    ],
}
CASES = [
    pytest.param(size, number, id=f"{size}-{family}-" + "-".join(f"{k}={v}" for k, v in mesh.items() if k != "ranks"),
                 marks=[pytest.mark.slow] if size == 2 else [pytest.mark.slow, pytest.mark.nightly])
    for size, jobs in MESHES.items() for number, (family, mesh) in enumerate(jobs)]


@cache
def single(family: str) -> dict[str, Any]:
    """One process, the same batches."""
    return learner_cases.trained(Learner(learner_cases.run(family, {})))


@cache
def many(size: int) -> list[list[dict[str, Any]]]:
    return ranks.run(size, learner_cases.world, MESHES[size], timeout_s=100)


@pytest.mark.parametrize(("size", "number"), CASES)
def test_a_step_on_many_ranks_is_that_of_one(size: int, number: int) -> None:
    """Every gradient to 1e-6 of its largest, loss and norm, then the weights that are published after two steps."""
    expected, found = single(MESHES[size][number][0]), many(size)[0][number]
    learner_cases.same(found, expected)
    assert all(result[number]["again"] for result in many(size))
    world, microbatches = MESHES[size][number][1]["ranks"], sum(m["microbatches"] for m in found["metrics"])
    each = microbatches * MESHES[size][number][1].get("tensor", 1) // world
    assert found["passes"] == each * (2 if MESHES[size][number][1].get("recompute") else 1)


@pytest.mark.slow
@pytest.mark.nightly
def test_bfloat16_keeps_float32_masters_on_every_shard() -> None:
    """What DeepEP carries: the loss and the norm of one process to the precision of the dtype, and an exact resume."""
    base = learner_cases.run("qwen3_moe", {})
    single = Learner(base.model_copy(update={"model": base.model.model_copy(update={"dtype": "bfloat16"})}))
    expected = [single.step(groups(5, seed=number), number) for number in (1, 2)]
    found = ranks.run(2, learner_cases.halves)
    for one, other in zip(found[0]["metrics"], expected, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
        assert one["loss"] == pytest.approx(other["loss"], abs=0.02)
    assert found[0]["masters"] == len([p for p in single.model.parameters() if p.requires_grad]) and found[0]["again"]


def test_rows_are_shared_by_what_they_cost() -> None:
    """One long row weighs as much as many short ones: quadratic in length. Every row once, and the same on every rank."""
    lengths = [4000, *[500] * 12, *[100] * 7]
    costs = [cost(n, 32) for n in lengths]
    parts = partition(costs, 4)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert [0] in parts, "the long one is alone"
    loads = sorted(sum(costs[i] for i in part) for part in parts)
    assert loads[2] <= 1.2 * loads[0]
    assert partition([1, 1], 4).count([]) == 2


@pytest.mark.parametrize(("settings", "told"), [
    (dict(ranks=2, experts=2, pipeline=2), "pipeline = 2 together with experts"),
    (dict(ranks=2, pipeline=2), "pipeline = 2 together with FSDP"),
    (dict(ranks=3, tensor=2), "tensor = 2 does not divide ranks = 3"),
    (dict(ranks=4, experts=3), "experts = 3 must divide ranks = 4"),
    (dict(ranks=12, experts=12, ranks_per_node=8), "take whole nodes"),
    (dict(exchange="deep_ep"), "nothing to exchange"),
])
def test_meshes_that_cannot_be_are_refused_in_the_run_file(settings, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_file(trainer={"parallel": settings})
