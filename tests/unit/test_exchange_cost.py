"""The cost model of token exchanges: its formulas against drawn routes, and what it chooses where."""

from __future__ import annotations

import numpy as np
import pytest

from services.trainer.parallel.cost import EXCHANGES, Fabric, Layer, choose, copies, hit, slow_bytes

QWEN = Layer(experts=128, top_k=8, hidden=2048)


@pytest.mark.parametrize(("ranks", "width"), [(4, 2), (8, 2), (8, 4), (16, 8), (8, 8)])
def test_copies_of_a_token_are_those_of_drawn_routes(ranks: int, width: int) -> None:
    """Formula (1) and the table under it, against 20,000 tokens with uniform routes: within 1 %."""
    layer, fabric = Layer(64, 8, 1024), Fabric(ranks, width, 9, 1)
    random = np.random.default_rng(0)
    routes = np.argsort(random.random((20_000, 64)), axis=1)[:, :8]
    rank_of, node_of = routes // (64 // ranks), routes // (64 // ranks) // width

    def distinct(values: np.ndarray, least: int, most: int) -> float:
        return sum((values == v).any(1).mean() for v in range(least, most))

    nodes = ranks // width
    drawn = {  # of a token of rank 0: it is on node 0
        "copy": ((node_of != 0).sum(1).mean(), ((node_of == 0) & (rank_of != 0)).sum(1).mean()),
        "flat": (distinct(rank_of, width, ranks), distinct(rank_of, 1, width)),
        "hierarchical": (distinct(node_of, 1, nodes), sum(
            distinct(np.where(node_of == n, rank_of % width, -1), 1, width) for n in range(nodes))),
    }
    for name, expected in drawn.items():
        assert copies(name, layer, fabric) == pytest.approx(expected, rel=0.01, abs=1e-9), name


def test_the_choice_depends_on_the_fabric_and_says_why() -> None:
    """Fast links nine times faster: hierarchical. Equal ones, or a single node: flat. DeepEP first wherever it is there."""
    among = ("hierarchical", "flat")
    assert choose(QWEN, Fabric(16, 8, 450, 50), 4096, among).name == "hierarchical"
    assert choose(QWEN, Fabric(16, 8, 50, 50), 4096, among).name == "flat"
    assert choose(QWEN, Fabric(8, 8, 450, 50), 4096, among).name == "flat"
    made = choose(QWEN, Fabric(16, 8, 450, 50), 4096, EXCHANGES)
    assert made.name == "deep_ep" and made.why.startswith("deep_ep: predicted ms") and "9.0:1" in made.why
    assert set(made.predicted_ms) == set(EXCHANGES)


def test_bytes_of_a_row_are_counted_whole() -> None:
    """A token of the published example: 2 nodes, every token of 8 experts of 64 crosses with 1 - C(32, 8) / C(64, 8)."""
    layer, fabric = Layer(64, 8, 1024, item=4), Fabric(4, 2, 9, 1)
    assert hit(64, 8, 32) == pytest.approx(0.99762, abs=1e-5)
    assert slow_bytes("hierarchical", layer, fabric, 100) == pytest.approx(100 * hit(64, 8, 32) * (1024 * 4 * 2 + 8 * 6))
    assert slow_bytes("copy", layer, fabric, 100) == pytest.approx(100 * 4 * (1024 * 4 * 2 + 6))
