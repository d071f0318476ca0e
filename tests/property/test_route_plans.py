"""Plans of the routes study: copies counted by hand, what plans promise to keep, and never worse than where they began."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.parallel import route_plans as plans
from services.trainer.parallel.partition import partition


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int, list[np.ndarray], np.ndarray]:
    """(experts, nodes, width, rows [T, L, K], an expert's node [L, E]); each row has experts that it prefers."""
    nodes, width, layers = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    experts = nodes * width * draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    top_k = draw(st.integers(1, min(3, experts)))
    rows = []
    for _ in range(draw(st.integers(1, 8))):
        taste = random.random((1, layers, experts)) * 2
        scores = taste + random.random((int(random.integers(1, 6)), layers, experts))
        rows.append(np.argsort(-scores)[..., :top_k].astype(np.uint8))
    node_L_E = np.stack([random.permutation(plans.contiguous(1, experts, nodes)[0]) for _ in range(layers)])
    return experts, nodes, width, rows, node_L_E


def by_hand(rows: list[np.ndarray], node_L_E: np.ndarray, node_R: np.ndarray) -> int:
    """Copies that cross, one token after the other."""
    return sum(
        len({int(node_L_E[layer, e]) for e in chosen} - {int(home)})
        for row, home in zip(rows, node_R, strict=True) for token in row for layer, chosen in enumerate(token))


def hits(rows: list[np.ndarray], node_L_E: np.ndarray, nodes: int) -> np.ndarray:
    return np.stack([plans.node_hits(row, node_L_E, nodes) for row in rows])


def nodes_of(parts: list[list[int]], width: int, count: int) -> np.ndarray:
    found = np.zeros(count, int)
    for rank, part in enumerate(parts):
        found[part] = rank // width
    return found


@settings(deadline=None, max_examples=40)
@given(batches())
def test_rows_go_where_fewer_copies_cross_and_ranks_stay_in_balance(given) -> None:
    """Every row once; no more copies than `partition` sends, counted by hand; no rank dearer than its dearest, or 2 %."""
    _, nodes, width, rows, node_L_E = given
    costs, ranks = [7 + len(row) for row in rows], nodes * width
    table = hits(rows, node_L_E, nodes)
    before, after = partition(costs, ranks), plans.assigned(table, costs, ranks, width)
    assert sorted(i for part in after for i in part) == list(range(len(rows)))
    sent = []
    for parts in (before, after):
        node_R = nodes_of(parts, width, len(rows))
        assert plans.slow_copies(table, node_R) == by_hand(rows, node_L_E, node_R)
        sent.append(by_hand(rows, node_L_E, node_R))
    assert sent[1] <= sent[0]
    loads = [[sum(costs[i] for i in part) for part in parts] for parts in (before, after)]
    assert max(loads[1]) <= max(max(loads[0]), 1.02 * np.mean(loads[0])) + 1e-9


@settings(deadline=None, max_examples=40)
@given(batches())
def test_what_an_exchange_of_two_experts_saves_is_counted(given) -> None:
    """Of every pair, by hand, tokens that have both among them."""
    experts, nodes, width, rows, node_L_E = given
    node_R = nodes_of(partition([len(row) for row in rows], nodes * width), width, len(rows))
    homes = np.repeat(node_R, [len(row) for row in rows])
    for layer, node_E in enumerate(node_L_E):
        ids = np.concatenate([row[:, layer] for row in rows])
        one = [row[:, [layer]] for row in rows]
        here = (ids[:, :, None] == np.arange(experts)).any(1).astype(np.float32)
        saved = plans.saved_by_exchange(here, homes[:, None] != np.arange(nodes), node_E)
        for i, j in zip(*np.nonzero(node_E[:, None] != node_E), strict=True):
            other = node_E.copy()
            other[i], other[j] = node_E[j], node_E[i]
            assert saved[i, j] == by_hand(one, node_E[None], node_R) - by_hand(one, other[None], node_R)


@settings(deadline=None, max_examples=40)
@given(batches())
def test_experts_go_where_fewer_copies_cross(given) -> None:
    """As many on each node as before, no node busier than the busiest was, and no more copies, if no node was too busy."""
    experts, nodes, width, rows, node_L_E = given
    node_R = nodes_of(partition([len(row) for row in rows], nodes * width), width, len(rows))
    homes = np.repeat(node_R, [len(row) for row in rows])
    for layer, node_E in enumerate(node_L_E):
        ids = np.concatenate([row[:, layer] for row in rows])
        one = [row[:, [layer]] for row in rows]
        found = plans.placed_on_nodes(ids, homes, node_E, nodes)
        assert np.bincount(found, minlength=nodes).tolist() == np.bincount(node_E, minlength=nodes).tolist()
        load_E = plans.load_of(ids, experts)
        before, after = (np.bincount(n, load_E, nodes) for n in (node_E, found))
        assert after.max() <= max(before.max(), 1.08 * before.mean()) + 1e-9
        if before.max() <= 1.08 * before.mean():
            assert by_hand(one, found[None], node_R) <= by_hand(one, node_E[None], node_R)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 30))
def test_ranks_of_a_node_share_its_experts(nodes: int, width: int, each: int, seed: int) -> None:
    """Equally many on each rank, all on their nodes, and no rank busier than the mean of its node and one expert."""
    random = np.random.default_rng(seed)
    node_E = random.permutation(np.repeat(np.arange(nodes), width * each))
    load_E = random.integers(0, 50, len(node_E))
    rank_E = plans.placed_on_ranks(load_E, node_E, width)
    assert (rank_E // width == node_E).all() and (np.bincount(rank_E, minlength=nodes * width) == each).all()
    for node in range(nodes):
        load = np.bincount(rank_E[node_E == node] - node * width, load_E[node_E == node], width)
        assert load.max() <= load.mean() + load_E[node_E == node].max() + 1e-9


def test_the_worked_example() -> None:
    """Of route_plans.py."""
    row = np.array([[[0, 1]], [[1, 2]]], np.uint8)
    for layout, expected in (([0, 0, 1, 1], [2, 1]), ([1, 0, 0, 1], [2, 1]), ([0, 1, 1, 0], [1, 2])):
        assert plans.node_hits(row, np.array([layout]), 2).tolist() == expected


def test_what_can_be_split_by_topic_is() -> None:
    """Rows of two topics, each with its own experts, laid out so that every copy crosses: both plans together send none."""
    rows = [np.array([[[0, 2]]] * 4 if topic else [[[1, 3]]] * 4, np.uint8) for topic in (0, 1, 0, 1)]
    node_E, costs = plans.contiguous(1, 4, 2)[0], [1] * 4
    parts = plans.assigned(hits(rows, node_E[None], 2), costs, 2, 1)
    assert plans.slow_copies(hits(rows, node_E[None], 2), nodes_of(parts, 1, 4)) == 16
    topics = nodes_of([[0, 2], [1, 3]], 1, 4)
    found = plans.placed_on_nodes(np.concatenate([row[:, 0] for row in rows]), np.repeat(topics, 4), node_E, 2)
    assert plans.slow_copies(hits(rows, found[None], 2), topics) == 0
    assert plans.max_over_mean(np.array([4, 4, 4, 4]), found, 2) == pytest.approx(1)
