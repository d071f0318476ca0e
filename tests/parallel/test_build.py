"""A model is built shard by shard: the bits of one process, in the memory of a shard."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import build_cases, ranks

TWO = dict(ranks=2, experts=2, exchange="flat")
MESHES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    2: [(name, TWO, {}) for name in build_cases.SHAPES] + [("mixtral", TWO, {"dtype": "bfloat16"})],
    4: [
        ("qwen3_moe", dict(ranks=4, experts=2, tensor=2, exchange="flat"), {}),
        ("mixtral", dict(ranks=4, experts=2, exchange="flat"), {}),
        (build_cases.TIED, dict(ranks=4, experts=1), {}),
    ],
}
FROM_DISK = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", build_cases.TIED]
MARKS = {2: [pytest.mark.slow], 4: [pytest.mark.slow, pytest.mark.nightly]}
CASES = [pytest.param(size, number, id=f"{size}-{name}-{number}", marks=MARKS[size])
         for size, jobs in MESHES.items() for number, (name, _, _) in enumerate(jobs)]


@cache
def seeded(size: int) -> list[list[dict[str, Any]]]:
    return ranks.run(size, build_cases.world, MESHES[size], timeout_s=100)


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


@pytest.mark.parametrize(("size", "number"), CASES)
def test_a_seed_gives_the_bits_of_one_process(size: int, number: int) -> None:
    """Whatever a family draws, in whatever order, and in its buffers, too; ten families, on two meshes of four ranks three."""
    for found in seeded(size):
        same(dict(found[number]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FROM_DISK)), ids=FROM_DISK)
def test_a_directory_is_read_as_one_process_reads_it(loaded: list[list[dict[str, Any]]], number: int) -> None:
    """Experts saved one by one and read as a stack, embeddings that are tied, routers with a bias."""
    for found in loaded:
        same(dict(found[number]))


@pytest.mark.slow
def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    """Two ranks with half of it each: what building takes at most is that half, and a tenth."""
    for found in ranks.run(2, build_cases.peaks, TWO, build_cases.saved(tmp_path), timeout_s=100):
        for kind in ("seed", "directory"):
            assert found[f"{kind}, kept"] == pytest.approx(0.5, abs=0.01)
            assert found[kind] < 0.65, found
