"""What one process can do, ranks can: every feature of a step gives the gradients, figures and refusals of one process.

In float64 throughout, where 1e-12 says that nothing but the order of sums differs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from services.trainer.learner import Learner
from services.trainer.nonfinite import Culprit
from tests.parallel import equality_cases, ranks
from tests.parallel.equality_cases import CASES, METRICS

pytestmark = pytest.mark.timeout(400)
TWO = dict(ranks=2, experts=2, exchange="flat")
ALL = dict(ranks=4, experts=4, exchange="hierarchical", ranks_per_node=2)
HALF = dict(ranks=4, experts=2, exchange="flat")
SPLIT = dict(ranks=4, experts=2, tensor=2, exchange="flat")
JOBS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "two": [
        ("everything", TWO), ("critic", TWO), ("misled", TWO), ("culprits", TWO), ("supervised", TWO),
        ("packed_everything", TWO)],
    "each": [
        *((case, TWO) for case in CASES if case not in ("adapted_experts", "recomputed_adapter")),
        *(("everything", TWO | other) for other in (
            {"recompute": True}, {"context": 2}, {"exchange": "copy"}, {"exchange": "all_gather"}, {"experts": 1})),
        ("critic", TWO | {"context": 2}), ("adapter", TWO | {"context": 2}), ("recomputed_adapter", TWO | {"recompute": True}),
        ("adapted_experts", TWO | {"experts": 1}), ("packed_linear", TWO | {"recompute": True}),
    ],
    "four": [
        *(("everything", mesh) for mesh in (ALL, HALF, SPLIT)), *(("critic", mesh) for mesh in (ALL, SPLIT)), ("adapter", HALF),
        ("misled", HALF), ("culprits", SPLIT)],
}
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
SLOW = {"two": [pytest.mark.slow], "each": NIGHTLY, "four": NIGHTLY}
LABELS = {(size, n): f"{size}-{case}-" + "-".join(f"{k}={v}" for k, v in mesh.items() if k != "ranks")
          for size, jobs in JOBS.items() for n, (case, mesh) in enumerate(jobs)}


def of(*names: str) -> list[Any]:
    """Jobs of these names, as parameters."""
    return [
        pytest.param(size, number, id=LABELS[size, number], marks=SLOW[size])
        for size, jobs in JOBS.items() for number, (case, _) in enumerate(jobs) if case in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return equality_cases.teacher(tmp_path_factory.mktemp("teacher"))


@cache
def single(case: str, folder: str, tokens: int = 48) -> dict[str, Any]:
    """One process, the same batches."""
    return equality_cases.trained(Learner(equality_cases.run(case, {}, folder, tokens)), case)


@pytest.fixture(scope="module")
def two(folder: str) -> list[list[Any]]:
    """What each of two ranks found, job by job, in one world."""
    return ranks.run(2, equality_cases.world, JOBS["two"], folder, timeout_s=200)


@pytest.fixture
def many(request: pytest.FixtureRequest, size: str, number: int, folder: str) -> list[Any]:
    """What each rank found in a job."""
    if size == "two":
        return [found[number] for found in request.getfixturevalue("two")]
    job = JOBS[size][number]
    return [found for [found] in ranks.run(job[1]["ranks"], equality_cases.world, [job], folder, timeout_s=400)]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Gradients to 1e-12 of their largest entry, figures to 1e-9; in float32 to 1e-5."""
    assert set(found["gradients"]) == set(expected["gradients"])
    single = any(value.dtype == np.float32 for value in expected["gradients"].values())
    for name, value in expected["gradients"].items():
        np.testing.assert_allclose(
            found["gradients"][name], value, rtol=0, atol=(1e-5 if single else 1e-12) * np.abs(value).max(), err_msg=name)
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        for name in METRICS:
            value = other.get(name)
            close = 1e-5 if single else 1e-9
            assert one.get(name) == (value if value is None else pytest.approx(value, rel=close, abs=close)), name


@pytest.mark.parametrize(("size", "number"), of(*CASES))
def test_a_step_on_ranks_is_that_of_one_process(size: str, number: int, folder: str, many: list[Any]) -> None:
    """Policy and critic, before the first update and in the figures of the second step, on whatever mesh."""
    expected, found = single(JOBS[size][number][0], folder), many[0]
    same(found, expected)
    assert found["weights"].keys() == expected["weights"].keys()
    assert found["base"] == expected["base"]
    assert all(rank["again"] for rank in many), "a snapshot put back does not go on the same"


@pytest.mark.parametrize("case", ["everything", "critic"])
def test_micro_batches_are_one_batch(case: str, folder: str) -> None:
    """The same in one process: cut in five or not at all."""
    assert single(case, folder)["metrics"][0]["microbatches"] > 4
    same(single(case, folder, 10_000), single(case, folder))


@pytest.mark.parametrize("case", [
    "everything", "critic", "own_routes", *(pytest.param(case, marks=NIGHTLY) for case in ("sequence_means", "adapter"))])
def test_packed_rows_are_one_batch(case: str, folder: str) -> None:
    """Segments that share rows, in one process: sequence means count samples, routes and values find their tokens, loads and
    auxiliary losses are those without padding."""
    packed, rows = single(f"packed_{case}", folder), single(case, folder)
    assert packed["metrics"][0]["microbatches"] <= rows["metrics"][0]["microbatches"]
    same(packed, rows)


@pytest.mark.parametrize(("size", "number"), of("misled"))
def test_routes_that_mislead_are_refused_on_every_rank(size: str, number: int, many: list[Any]) -> None:
    """One row on one rank names an expert that is not there, or one twice; or all rows have routes of other tokens. Every rank
    says the same and none has applied anything."""
    for found in many:
        assert found == {"told": ["ROUTES_EXPERT", "ROUTES_EXPERT", "ROUTES_MISALIGNED"], "same": True}


@pytest.mark.parametrize(("size", "number"), of("supervised"))
def test_a_warm_up_on_ranks_is_that_of_one_process(size: str, number: int, many: list[Any]) -> None:
    """Straight after the start, where rank 0 alone has looked at its state, for a checkpoint that is not there yet."""
    expected, found = equality_cases.supervised({}), many[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(np.frombuffer(found[name]), np.frombuffer(value), rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("size", "number"), of("culprits"))
def test_who_is_behind_a_step_that_is_not_finite(size: str, number: int, many: list[Any]) -> None:
    """A gradient is everybody's: a micro-batch is tried again while other ranks idle, then its rows. The same name everywhere,
    nothing applied, and the next step is a good one."""
    for of_loss, of_gradient, then in many:
        for (skip, skipped, samples, unchanged), what in ((of_loss, "loss"), (of_gradient, "gradient")):
            assert list(skip.culprits) == [Culprit(2, 3, 0, what)] and skipped == 1 and samples == 1 and unchanged
        assert then == 0
