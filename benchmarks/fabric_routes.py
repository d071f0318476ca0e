"""Do routes that are known before a step save bytes between nodes? A study on routes of a trained model; nothing is sent.

    python -m benchmarks.fabric_routes [--experts 64] [--top-k 8] [--steps 220] [--routes FILE.npz] [--json FILE]

Copies of tokens that cross between nodes, all layers counted, against the static `hierarchical` exchange (rows by cost, experts
in blocks), at 2 and 4 nodes of 2 ranks:

    rows         each row to the node that has most of its experts, costs of ranks balanced as before
    experts      each layer's experts to the nodes of their tokens, and to ranks so that all are about equally busy
    both         rows by topic, then one after the other, a few times
    copies alone both, however busy the ranks get

each for the batch that is planned, and with experts placed by that batch for another one ("next", as with a model that was
relabelled before a run: services/trainer/parallel/placement.py). Batches are mixed, of one kind of text, and a control whose
routes are drawn by chance. The bound is a row on its best node, whatever the balance.

What moving experts while a run goes on would cost is said in steps: bytes of the experts that change nodes, with their moments,
over the bytes that a step saves, for a model of the size of Qwen3-30B-A3B and a million tokens a step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import publish
from services.trainer.parallel import route_plans as plans
from services.trainer.parallel.partition import cost, partition

WIDTH = 2
ROUNDS = 6
TOLERANCE, NONE = 0.08, 100.0  # of the load of a node, over the mean; the former is that of placement.py
# Of Qwen3-30B-A3B in bfloat16: an expert with float32 master and moments; a row out, or back, in one direction.
EXPERT_BYTES, ROW_BYTES = 3 * 2048 * 768 * (2 + 12), 2048 * 2
BIG_LAYERS, BIG_EXPERTS = 48, 48 * 128
STEP_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step."""

    routes: list[np.ndarray]  # [T, L, K] each
    costs: list[int]

    def flat(self, layer: int) -> np.ndarray:
        """[P, K] of all rows, one after the other."""
        return np.concatenate([row[:, layer] for row in self.routes])

    def homes(self, parts: list[list[int]]) -> np.ndarray:
        """[P]: node of each token."""
        return np.repeat(self.nodes(parts), [len(row) for row in self.routes])

    def nodes(self, parts: list[list[int]]) -> np.ndarray:
        """[R]: node of each row."""
        found = np.zeros(len(self.routes), int)
        for rank, part in enumerate(parts):
            found[part] = rank // WIDTH
        return found

    def shares(self, experts: int) -> np.ndarray:
        """[R, L * E]: how often a token of each row takes each expert."""
        return np.stack([
            np.concatenate([plans.load_of(row[:, layer], experts) / len(row) for layer in range(row.shape[1])])
            for row in self.routes])

    def hits(self, node_L_E: np.ndarray, nodes: int) -> np.ndarray:
        """[R, N]"""
        return np.stack([plans.node_hits(row, node_L_E, nodes) for row in self.routes])


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one arm."""

    copies: int  # that cross, each way
    load: float  # busiest rank over mean, the mean of the layers
    worst: float  # of the worst layer
    moved: int  # experts on another node than in the static layout
    balance: float  # dearest rank over mean


def batch(routes: np.ndarray, seed: int, hidden: int = 128) -> Batch:
    """Rows of unequal lengths, as answers are: a quarter to the whole of what was recorded."""
    random = np.random.default_rng(seed)
    lengths = random.integers(routes.shape[1] // 4, routes.shape[1] + 1, len(routes))
    rows = [row[:length] for row, length in zip(routes, lengths.tolist(), strict=True)]
    return Batch(rows, [cost(len(row), hidden) for row in rows])


def outcome(given: Batch, rank_L_E: np.ndarray, parts: list[list[int]], experts: int, ranks: int) -> Outcome:
    """What a layout of rows and experts sends, and how evenly it works."""
    node_L_E, nodes = rank_L_E // WIDTH, ranks // WIDTH
    loads = [plans.max_over_mean(plans.load_of(given.flat(layer), experts), rank_E, ranks)
             for layer, rank_E in enumerate(rank_L_E)]
    static = plans.contiguous(len(rank_L_E), experts, nodes)
    dear = np.array([sum(given.costs[i] for i in part) for part in parts])
    return Outcome(
        plans.slow_copies(given.hits(node_L_E, nodes), given.nodes(parts)), float(np.mean(loads)), max(loads),
        int((node_L_E != static).sum()), float(dear.max() / dear.mean()))


def placed(
    given: Batch, node_L_E: np.ndarray, parts: list[list[int]], nodes: int, tolerance: float = TOLERANCE,
) -> np.ndarray:
    """Nodes of every layer's experts for rows that lie so."""
    homes = given.homes(parts)
    return np.stack([
        plans.placed_on_nodes(given.flat(layer), homes, node_E, nodes, tolerance) for layer, node_E in enumerate(node_L_E)])


def on_ranks(given: Batch, node_L_E: np.ndarray, experts: int) -> np.ndarray:
    """Ranks of every layer's experts."""
    return np.stack([
        plans.placed_on_ranks(plans.load_of(given.flat(layer), experts), node_E, WIDTH)
        for layer, node_E in enumerate(node_L_E)])


def arms(now: Batch, then: Batch, experts: int, nodes: int) -> Iterator[tuple[str, Outcome]]:
    """Every arm; `then` is another batch, of which only its rows' assignment may know."""
    ranks, layers = nodes * WIDTH, now.routes[0].shape[1]
    blocks = plans.contiguous(layers, experts, ranks)

    def rows(given: Batch, node_L_E: np.ndarray) -> list[list[int]]:
        return plans.assigned(given.hits(node_L_E, nodes), given.costs, ranks, WIDTH)

    static = partition(now.costs, ranks)
    yield "static", outcome(now, blocks, static, experts, ranks)
    yield "rows", outcome(now, blocks, rows(now, blocks // WIDTH), experts, ranks)
    alone = on_ranks(now, placed(now, blocks // WIDTH, static, nodes), experts)
    yield "experts", outcome(now, alone, static, experts, ranks)
    found = {}
    for arm, tolerance in (("both", TOLERANCE), ("copies alone", NONE)):
        node_L_E, parts = blocks // WIDTH, plans.by_topic(now.shares(experts), now.costs, ranks, WIDTH)
        for _ in range(ROUNDS):
            node_L_E = placed(now, node_L_E, parts, nodes, tolerance)
            parts = rows(now, node_L_E)
        found[arm] = on_ranks(now, node_L_E, experts)
        yield arm, outcome(now, found[arm], rows(now, found[arm] // WIDTH), experts, ranks)
    yield "static, next", outcome(then, blocks, partition(then.costs, ranks), experts, ranks)
    yield "experts, next", outcome(then, alone, partition(then.costs, ranks), experts, ranks)
    for arm, rank_L_E in found.items():
        yield f"{arm}, next", outcome(then, rank_L_E, rows(then, rank_L_E // WIDTH), experts, ranks)


def bound(given: Batch, experts: int, nodes: int) -> float:
    """Copies of static rows over those with each row on its best node."""
    hits = given.hits(plans.contiguous(given.routes[0].shape[1], experts, nodes), nodes)
    best = hits.sum() - hits.max(1).sum()
    return plans.slow_copies(hits, given.nodes(partition(given.costs, nodes * WIDTH))) / max(1, int(best))


def pays_after(found: Outcome, static: Outcome, pairs: int, places: int) -> float:
    """Steps of STEP_TOKENS tokens after which the bytes saved make up for the experts that were moved. `pairs`: (token, layer)
    pairs of the batch; `places`: (layer, expert) pairs of the model. A step crosses four times: out and back, forward and back.
    """
    moved = found.moved / places * BIG_EXPERTS * EXPERT_BYTES
    saved = (static.copies - found.copies) / pairs * STEP_TOKENS * BIG_LAYERS * ROW_BYTES * 4
    return moved / saved if saved > 0 else float("inf")


def studied(given: np.ndarray, kinds: np.ndarray, experts: int) -> Iterator[tuple[str, int, str, Outcome, float, float]]:
    """(batch, nodes, arm, outcome, static copies over its own, steps after which moving pays), every arm of every case."""
    random = np.random.default_rng(0)
    chance = random.random((*given.shape[:3], experts)).argpartition(given.shape[3], -1)[..., : given.shape[3]]
    cases = {"mixed": given, **{f"kind {kind}": given[kinds == kind] for kind in np.unique(kinds)[:2]}, "chance": chance}
    for name, routes in cases.items():
        now, then = batch(routes[::2], 0), batch(routes[1::2], 1)
        for nodes in (2, 4):
            if experts % (nodes * WIDTH):
                continue
            static: Outcome | None = None
            for arm, found in arms(now, then, experts, nodes):
                static = found if static is None or arm == "static, next" else static
                of = then if arm.endswith("next") else now
                pairs = sum(row.shape[0] * row.shape[1] for row in of.routes)
                yield (name, nodes, arm, found, static.copies / max(1, found.copies),
                       pays_after(found, static, pairs, experts * routes.shape[2]))
            yield name, nodes, "bound of rows", static_of(now, nodes, experts), bound(now, experts, nodes), 0.0


def static_of(given: Batch, nodes: int, experts: int) -> Outcome:
    """Rows by cost, experts in blocks."""
    ranks = nodes * WIDTH
    blocks = plans.contiguous(given.routes[0].shape[1], experts, ranks)
    return outcome(given, blocks, partition(given.costs, ranks), experts, ranks)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """With what `routes_of` needs."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    for name, default in dict(experts=64, top_k=8, layers=4, steps=220, rows=256).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--routes", type=Path, help="read recorded routes, or write them when there are none")
    parser.add_argument("--json", default="")
    return parser


def routes_of(given: argparse.Namespace) -> dict[str, Any]:
    """routes, kinds, experts and losses: read, or recorded from a model that is trained for it."""
    if given.routes and given.routes.is_file():
        with np.load(given.routes) as file:
            return dict(file)
    from benchmarks.routed_text import Sizes, recorded

    one = recorded(Sizes(given.experts, given.top_k, given.layers, steps=given.steps), given.rows)
    found: dict[str, Any] = {
        "routes": one.routes, "kinds": one.kinds, "experts": np.array(given.experts), "losses": np.array(one.losses)}
    print(f"trained {given.steps} steps in {one.seconds:.0f} s: {one.losses[0]:.2f} -> {one.losses[1]:.2f} nats a token")
    if given.routes:
        np.savez_compressed(given.routes, **found)
    return found


def main() -> int:
    """Train or read, study, report."""
    given = parser("fabric_routes", "What routes known before a step could save.").parse_args()
    found = routes_of(given)
    rows = list(studied(found["routes"], found["kinds"], int(found["experts"])))
    figures: dict[str, Any] = {
        "experts": int(found["experts"]), "top_k": int(found["routes"].shape[-1]), "loss": float(found["losses"][1])}
    for name, nodes, arm, one, ratio, _ in rows:
        if name in ("mixed", "chance"):
            key = f"{arm.replace(', ', '_').replace(' ', '_')}_{nodes}_nodes" + "_chance" * (name == "chance")
            figures |= {f"bytes_static_over_{key}": ratio, f"max_over_mean_load_{key}": one.load}
            if key == "experts_next_4_nodes":  # what a relabelled model does
                figures |= {"bytes_static_over_planned": ratio, "max_over_mean_load": one.load}
    columns = (
        "batch", "nodes", "arm", "static / arm", "load", "worst", "moved", "rank cost", "pays after")
    publish("Copies of tokens between nodes, routes known before the step", columns, [
        (name, str(nodes), arm, f"{ratio:.3f}", f"{one.load:.3f}", f"{one.worst:.3f}", str(one.moved), f"{one.balance:.3f}",
         f"{steps:.1f} steps" if one.moved else "") for name, nodes, arm, one, ratio, steps in rows], figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
