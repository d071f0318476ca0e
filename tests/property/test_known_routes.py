"""Counts that are known before a step are those that the ranks would have told each other, for any routes and any mesh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.packing import Microbatch, microbatches
from services.trainer.parallel.known_routes import UNKNOWN, Splits, counted, counts, known, real
from services.trainer.ranks import idle
from slipstream.errors import ConfigError
from tests.property.routed_rows import row
from tests.trainer_samples import run_file


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int, list[np.ndarray]]:
    """(experts, nodes, width, routes [N, 1, K] of each rank), some without tokens."""
    nodes, width, local = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = nodes * width * local
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    top_k = draw(st.integers(1, min(4, experts)))
    return experts, nodes, width, [
        np.array([random.permutation(experts)[:top_k] for _ in range(draw(st.integers(0, 6)))], np.uint8).reshape(-1, 1, top_k)
        for _ in range(nodes * width)]


def told(hop: list[list[int]]) -> list[list[int]]:
    """What each rank hears in an all-to-all in which it says hop[rank]."""
    return [list(heard) for heard in zip(*hop, strict=True)]


@given(groups())
def test_splits_are_what_an_all_to_all_of_counts_would_say(given: tuple[int, int, int, list[np.ndarray]]) -> None:
    """Of one hop between all ranks, and of both hops of a hierarchical exchange, whose second sends what the first brought."""
    experts, nodes, width, routes = given
    ranks, local = nodes * width, experts // (nodes * width)
    table = np.stack([counted(r, experts, ranks, nodes)[0] for r in routes])
    splits = Splits(table[:, :ranks], table[:, ranks:])

    def wants(tokens: np.ndarray, first: int, count: int) -> np.ndarray:
        return ((tokens >= first) & (tokens < first + count)).any((1, 2))

    direct = [[int(wants(r, to * local, local).sum()) for to in range(ranks)] for r in routes]
    assert [splits.direct(rank) for rank in range(ranks)] == list(zip(direct, told(direct), strict=True))
    arrived: dict[int, np.ndarray] = {}
    for place in range(width):
        rail = [n * width + place for n in range(nodes)]
        sent = {(a, b): routes[a][wants(routes[a], b // width * width * local, width * local)] for a in rail for b in rail}
        hop = [[len(sent[a, b]) for b in rail] for a in rail]
        assert [splits.rail(rank) for rank in rail] == list(zip(hop, told(hop), strict=True))
        arrived |= {b: np.concatenate([sent[a, b] for a in rail]) for b in rail}
    for node in range(nodes):
        members = range(node * width, (node + 1) * width)
        hop = [[int(wants(arrived[a], b * local, local).sum()) for b in members] for a in members]
        assert [splits.node(rank) for rank in members] == list(zip(hop, told(hop), strict=True))


def test_the_worked_example() -> None:
    """Of known_routes.py."""
    routes = np.array([[[0, 1]], [[1, 3]]], np.uint8)
    assert counted(routes, 4, 4, 2).tolist() == [[1, 2, 0, 1, 2, 1]]


def batch(*lengths: int, routed: bool = True, packed: bool = False) -> Microbatch:
    """Of rows of these lengths, two layers of 8 experts, 2 per token."""
    rows = [row(length, number, layers=2, experts=8, top_k=2) for number, length in enumerate(lengths)]
    [made] = microbatches(rows, 99, packed)
    return made if routed else dataclasses.replace(made, routes=None, routed=None)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_is_not_counted(packed: bool) -> None:
    """A padded micro-batch counts what its rows count alone, and one that is packed the same."""
    one, other = (row(length, number, layers=2, experts=8, top_k=2) for number, length in enumerate((5, 3)))
    alone = sum(counted(r.routes, 8, 4, 2) for r in (one, other))  # pyright: ignore
    made = batch(5, 3, packed=packed)
    assert known(made) and np.array_equal(counts(made, 2, 8, 4, 2), alone)
    assert real(made).sum() == 8


@given(st.integers(1, 5))
def test_slices_of_a_tensor_parallel_group_add_up(size: int) -> None:
    """Every token is in one slice, cut as torch.chunk cuts."""
    made = batch(5, 5)
    assert made.routes is not None
    pieces = torch.from_numpy(made.routes).reshape(10, 2, 2).chunk(size)
    for i in range(size):
        expected = counted(pieces[i].numpy(), 8, 4, 2) if i < len(pieces) else 0
        assert (counts(made, 2, 8, 4, 2, (i, size)) == expected).all()


def test_exchanges_that_ask_for_no_counts_are_refused() -> None:
    """By the names of both settings."""
    with pytest.raises(ConfigError, match="plan_routes beside exchange = all_gather"):
        run_file(trainer={"parallel": {"ranks": 2, "experts": 2, "exchange": "all_gather", "plan_routes": True}})
    run_file(trainer={"parallel": {"ranks": 2, "experts": 2, "exchange": "flat", "plan_routes": True}})


def test_what_has_no_routes_is_exchanged_as_ever() -> None:
    """A token without routes makes its micro-batch unknown; a rank that idles has none and is known."""
    assert (counts(batch(5, 3, routed=False), 2, 8, 4, 2) == UNKNOWN).all()
    made = batch(5, 3)
    assert made.routed is not None
    holes = made.routed.copy()
    holes[1, 2] = False
    assert not known(dataclasses.replace(made, routed=holes))
    assert not counts(idle(), 2, 8, 4, 2).any()
