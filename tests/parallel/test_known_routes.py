"""Where routes are known before a step, exchanges ask for no counts, and everything else is as ever."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from services.trainer.learner import Learner
from services.trainer.nonfinite import Culprit
from tests.parallel import equality_cases, known_cases, ranks
from tests.parallel import exchange_cases as cases
from tests.parallel.test_equality import ALL, HALF, SPLIT, TWO, same

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(400)]
PLANNED = {"plan_routes": True}
JOBS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [("routes", TWO), ("routes", TWO | PLANNED), ("everything", TWO | PLANNED),
        ("everything", TWO | PLANNED | {"recompute": True}),
        ("everything", TWO | PLANNED | {"context": 2}), ("own_routes", TWO | PLANNED), ("plain", TWO | PLANNED),
        ("packed_everything", TWO | PLANNED), ("pierced", TWO | PLANNED), ("broken", TWO | PLANNED)],
    4: [("everything", ALL | PLANNED), ("everything", HALF | PLANNED), ("everything", SPLIT | PLANNED)],
}


@cache
def exchanged() -> list[dict[str, Any]]:
    return ranks.run(4, known_cases.told)


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_an_exchange_that_is_told_sends_the_same_to_the_bit(name: str) -> None:
    """Rows in their order, results and gradients of ordinary numbers, for skewed, empty and uneven loads; a collective less for
    each hop of a dispatch."""
    hops = {"flat": 1, "hierarchical": 2}[name]
    for found in exchanged():
        for case in cases.CASES:
            assert found[f"{name} {case}"] == (True, 5 * hops, 4 * hops), case
        assert found[f"{name} wrong"] == "ROUTES_FORESEEN"


@cache
def stepped(size: int, folder: str) -> list[list[dict[str, Any]]]:
    return ranks.run(size, known_cases.steps, JOBS[size], folder, timeout_s=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return equality_cases.teacher(tmp_path_factory.mktemp("teacher"))


@cache
def single(case: str, folder: str) -> dict[str, Any]:
    """One process, the same batches."""
    return equality_cases.trained(Learner(equality_cases.run(case, {}, folder)), case)


@pytest.mark.parametrize(("size", "number"), [
    pytest.param(size, number, id=f"{size}-{case}-" + "-".join(f"{k}={v}" for k, v in mesh.items() if k != "ranks"))
    for size, jobs in JOBS.items() for number, (case, mesh) in enumerate(jobs) if case not in ("pierced", "broken")])
def test_a_planned_step_is_that_of_one_process(size: int, number: int, folder: str) -> None:
    """In float64 to 1e-12, a step in which a rank idles among them; with layers that run again, pieces of rows, slices of
    tokens, experts on half of the ranks, the trainer's own routes, none at all, and segments that share rows."""
    found = stepped(size, folder)
    same(found[0][number], single(JOBS[size][number][0], folder))
    assert all(rank[number]["again"] for rank in found)


def job(name: str) -> int:
    return [case for case, _ in JOBS[2]].index(name)


def collectives(job: tuple[str, dict[str, Any]], folder: str) -> tuple[int, int]:
    """All-to-alls of the two steps of a job of two ranks, and the passes with a gradient: as many on each."""
    [found] = [rank for (case, mesh), rank in zip(JOBS[2], stepped(2, folder)[0], strict=True) if (case, mesh) == job]
    return found["exchanges"], sum(m["microbatches"] for m in found["metrics"]) // 2


def test_a_planned_step_asks_for_no_counts(folder: str) -> None:
    """One all-to-all less in each of two layers of every pass with a gradient. The pass that looks whether the routes are the
    right ones has none to plan by.
    """
    asking, passes = collectives(("routes", TWO), folder)
    planned, same_passes = collectives(("routes", TWO | PLANNED), folder)
    assert passes == same_passes and asking - planned == 2 * passes


def test_a_micro_batch_with_a_token_without_routes_asks(folder: str) -> None:
    """On whatever rank the token is; the micro-batches beside it are planned, and the step is that of one process."""
    found = stepped(2, folder)
    same(found[0][job("pierced")], known_cases.pierced({}))
    asking, passes = collectives(("routes", TWO), folder)
    assert 0 < asking - found[0][job("pierced")]["exchanges"] < 2 * passes


def test_a_planned_step_that_is_not_finite_names_its_sample(folder: str) -> None:
    """The search tries micro-batches alone while the other rank idles: nothing is planned there, and the next step is good."""
    for rank in stepped(2, folder):
        skip, skipped = rank[job("broken")]
        assert list(skip.culprits) == [Culprit(2, 3, 0, "loss")] and skipped == 0
