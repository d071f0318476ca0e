"""A model is built shard by shard: the bits of one process, in the memory of a shard."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import build_cases, ranks

TWO = dict(ranks=2, experts=2, exchange="flat")
# A block that initialises the router inside it; embeddings that are tied; fewer bits.
SOME = [("qwen3_next", TWO, {}), (build_cases.TIED, TWO, {}), ("mixtral", TWO, {"dtype": "bfloat16"})]
MESHES: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "some": SOME,
    "two": [(name, TWO, {}) for name in build_cases.SHAPES if name not in [job[0] for job in SOME[:2]]],
    "four": [
        ("qwen3_moe", dict(ranks=4, experts=2, tensor=2, exchange="flat"), {}),
        ("mixtral", dict(ranks=4, experts=2, exchange="flat"), {}),
        (build_cases.TIED, dict(ranks=4, experts=1), {}),
    ],
}
FROM_DISK = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", build_cases.TIED]
CASES = [pytest.param(world, number, id=f"{world}-{name}-{number}",
                      marks=[pytest.mark.slow] + [pytest.mark.nightly] * (world != "some"))
         for world, jobs in MESHES.items() for number, (name, _, _) in enumerate(jobs)]


@cache
def seeded(world: str) -> list[list[dict[str, Any]]]:
    return ranks.run(4 if world == "four" else 2, build_cases.world, MESHES[world], timeout_s=100)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("models")
    jobs = [(name, TWO, {"path": build_cases.saved(folder / str(n), name)}) for n, name in enumerate(FROM_DISK)]
    return ranks.run(2, build_cases.world, jobs, timeout_s=100)


def same(found: dict[str, Any]) -> None:
    """One process's model: every name, bit and file of it, and the same answer."""
    gap, training = found.pop("gap"), found.pop("training")
    assert found == {"names": set(), "differ": [], "dtypes": [], "files": []}
    assert gap < 0.02 and not training


@pytest.mark.parametrize(("world", "number"), CASES)
def test_a_seed_gives_the_bits_of_one_process(world: str, number: int) -> None:
    """Whatever a family draws, in whatever order, and in its buffers, too: ten families on two ranks, three on four."""
    for found in seeded(world):
        same(dict(found[number]))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(FROM_DISK)), ids=FROM_DISK)
def test_a_directory_is_read_as_one_process_reads_it(loaded: list[list[dict[str, Any]]], number: int) -> None:
    """Experts saved one by one and read as a stack, embeddings that are tied, routers with a bias."""
    for found in loaded:
        same(dict(found[number]))


@pytest.mark.slow
@pytest.mark.nightly
def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    """Two ranks with half of it each: what building takes at most is that half, and a tenth."""
    for found in ranks.run(2, build_cases.peaks, TWO, build_cases.saved(tmp_path), timeout_s=100):
        for kind in ("seed", "directory"):
            assert found[f"{kind}, kept"] == pytest.approx(0.5, abs=0.01)
            assert found[kind] < 0.65, found
