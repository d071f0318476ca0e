"""Ranks that share a sequence compute what one process does: attention in double precision, then whole steps of families."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest

from services.trainer.learner import Learner
from services.trainer.packing import Row, microbatches
from services.trainer.parallel import context
from services.trainer.parallel.context_attention import repeats
from slipstream.errors import ConfigError
from slipstream.model import build
from tests.parallel import context_cases, learner_cases, ranks
from tests.parallel.families import COMMON, FAMILIES
from tests.trainer_samples import CHARS, run_file

EXACT = 1e-12
JAMBA = COMMON | dict(num_experts=4, intermediate_size=32, mamba_d_state=4, mamba_dt_rank=4)
SEQUENCE = dict(policy_loss="gspo", aggregation="sequence_mean", entropy_coefficient=0.01)
MATRIX: dict[int, list[tuple[Any, ...]]] = {
    2: [
        ("qwen3_moe", dict(ranks=2, experts=2, context=2, exchange="flat", recompute=True)),
        ("gpt_oss", dict(ranks=2, experts=2, context=2, exchange="flat", recompute=True)),
        ("qwen3_moe", dict(ranks=2, context=2), SEQUENCE),
    ],
    4: [
        ("qwen3_moe", dict(ranks=4, experts=4, context=2, exchange="hierarchical", ranks_per_node=2)),
        ("qwen3_moe", dict(ranks=4, experts=2, context=2, tensor=2, exchange="flat")),
        ("qwen3_moe", dict(ranks=4, experts=2, context=4, exchange="flat"), SEQUENCE),
        *((family, dict(ranks=4, experts=4, context=4, exchange="flat")) for family in context_cases.SHAPES),
    ],
}
CASES = [
    pytest.param(size, number, id="-".join(
        [str(size), family, *(f"{k}={v}" for k, v in mesh.items() if k != "ranks"), *(part["policy_loss"] for part in more)]))
    for size, jobs in MATRIX.items() for number, (family, mesh, *more) in enumerate(jobs)]


@cache
def single(family: str, by_sequence: bool = False) -> dict[str, Any]:
    """One process, the same batches."""
    return context_cases.trained(Learner(context_cases.run(family, {}, SEQUENCE if by_sequence else {})))


@cache
def short() -> list[Any]:
    return ranks.run(2, context_cases.short)


@cache
def many(size: int) -> list[list[dict[str, Any]]]:
    return ranks.run(size, context_cases.world, MATRIX[size], timeout_s=300)


@pytest.mark.slow
def test_two_ranks_attend_and_train_as_one_process() -> None:
    """Attention in float64 to 1e-12, output and gradients: grouped heads, fewer of keys than ranks, windows, packed segments.
    Then two steps of the learner, experts on both ranks."""
    for exact, _ in short():
        for case, errors in zip(context_cases.ATTENTION, exact, strict=True):
            assert max(errors) < EXACT, case
    learner_cases.same(short()[0][1][0], single("qwen3_moe"))


@pytest.mark.slow
@pytest.mark.nightly
def test_attention_of_four_ranks_is_that_of_one() -> None:
    for exact in ranks.run(4, context_cases.attention):
        for case, errors in zip(context_cases.ATTENTION, exact, strict=True):
            assert max(errors) < EXACT, case


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("size", "number"), CASES)
def test_a_step_on_shared_sequences_is_that_of_one_process(size: int, number: int) -> None:
    """Families, meshes with experts and tensors, recomputation, and a loss that joins all tokens of a sequence."""
    family, _, *algorithm = MATRIX[size][number]
    learner_cases.same(many(size)[0][number], single(family, bool(algorithm)))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_family_with_more_than_attention_is_found_out_by_trying() -> None:
    """Linear attention that is not gathered: the look at the start refuses it on every rank."""
    for message in ranks.run(2, context_cases.undivided):
        assert "computes something else from divided sequences" in message


def rows(lengths: list[int]) -> list[Row]:
    """Rows of the tokens 1 2 3 ..., every other one trained."""
    random = np.random.default_rng(0)
    found = []
    for length in lengths:
        index = np.arange(1, length, 2)
        found.append(Row(
            np.arange(1, length + 1, dtype=np.int32), index, random.integers(1, 9, len(index)),
            random.random(len(index)).astype(np.float32), np.zeros(len(index), np.int64), advantages=random.random(len(index)),
            weight=1.0, routes=random.integers(0, 4, (length, 2, 2)).astype(np.uint8), reference=random.random(len(index))))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_equally_long_and_hold_every_token_once(size: int) -> None:
    """Rows of 7, 5 and 1 tokens: the last ranks have padding, some of them nothing else."""
    [batch] = microbatches(rows([7, 5, 1]), 100)
    parts = [context.share(batch, number, size) for number in range(size)]
    width = -(-7 // size)
    assert all(part.batch.inputs.shape == (3, width) for part in parts)
    joined = np.concatenate([part.batch.inputs for part in parts], axis=1)
    assert np.array_equal(joined[:, :7], batch.inputs) and not joined[:, 7:].any()
    assert np.array_equal(sum(part.at.astype(int) for part in parts), np.ones(len(batch.index)))
    assert [int(part.positions[0, 0]) for part in parts] == [n * width for n in range(size)]  # pyright: ignore
    for part in parts:
        predicted = part.batch.inputs.reshape(-1)[part.batch.index]
        assert np.array_equal(predicted, batch.inputs.reshape(-1)[batch.index][part.at])
        assert np.array_equal(part.batch.targets, batch.targets[part.at])
        assert np.array_equal(part.batch.reference, batch.reference[part.at])  # pyright: ignore
    lengths = sum(part.batch.lengths for part in parts)  # pyright: ignore
    assert lengths.tolist() == [7, 5, 1]  # pyright: ignore
    routes = np.concatenate([part.batch.routes for part in parts], axis=1)  # pyright: ignore
    assert np.array_equal(routes[:, :7], batch.routes)  # pyright: ignore


def test_every_field_of_a_micro_batch_is_divided() -> None:
    """Of two rows of three tokens each: by position, by row, and all others by trained token."""
    [batch] = microbatches(rows([3, 3]), 100)
    part = context.share(batch, 0, 3).batch
    for field in fields(part):
        value = getattr(part, field.name)
        if value is not None and len(value):
            assert value.shape[:2] == (2, 1) if field.name in ("inputs", *context.PER_POSITION) else (
                field.name == "lengths"), field.name


def test_a_group_is_made_of_neighbours_that_hold_the_same_part_of_a_matrix() -> None:
    assert context.groups(4, 1, 2) == [[0, 1], [2, 3]]
    assert context.groups(8, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(("heads", "keys", "size", "times"), [
    (8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 3, 2, 2), (12, 6, 4, 2), (6, 3, 2, 2)])
def test_heads_of_keys_are_repeated_no_more_than_needed(heads: int, keys: int, size: int, times: int) -> None:
    assert repeats(heads, keys, size) == times


@pytest.mark.parametrize(("family", "shape", "settings", "told"), [
    ("qwen3_moe", {}, dict(ranks=4, context=4), "4 (context x tensor) does not divide its 2 attention heads"),
    ("qwen3_moe", {}, dict(ranks=4, context=2, tensor=2), "4 (context x tensor) does not divide its 2 attention heads"),
    ("jamba", JAMBA, dict(ranks=2, context=2), "its layers (linear_attention) do more"),
    ("qwen3_moe", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, dict(ranks=2, context=2), "rope_type dynamic"),
])
def test_what_cannot_be_divided_is_refused_by_name(family: str, shape: dict, settings: dict, told: str) -> None:
    made = {"model_type": family, "tokenizer_chars": CHARS, "config": FAMILIES.get(family, {}) | shape}
    run = run_file(model={"build": made}, trainer={"parallel": settings})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.context = \d does not fit") as error:
        context.fits(build(run.model, 1)[0], run.trainer.parallel)
    assert told in error.value.message


def test_context_must_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="context = 2 x tensor = 2 does not divide ranks = 6"):
        run_file(trainer={"parallel": dict(ranks=6, context=2, tensor=2)})
