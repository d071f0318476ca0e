"""Plans by routes: experts to nodes of their tokens and to ranks that are equally busy; rows to the nodes of their experts.

Pure functions. placement.py uses those for experts; rows are a study's (benchmarks/fabric_routes.py), and the trainer deals
them out by cost alone: docs/guides/expert-parallelism.md says why.

Axes: R rows, T tokens of a row, L layers, K experts per token, E experts of a layer, N nodes of as many ranks, P tokens of a
layer. An expert's node and rank are per layer; a row's rank serves all layers, since tokens do not move between them.

What crosses between nodes, each way: one copy of a token for every node that has one of its experts, but for its own. With
`hits_R_N`, the (token, layer) pairs of each row that need each node, a row on node n sends hits.sum() - hits[n] copies.

Worked example: one layer, experts 0 1 on node 0 and 2 3 on node 1. A row of two tokens with experts {0, 1} and {1, 2} has
hits 2 1: on node 0 it sends 1 copy, on node 1 it sends 2. With experts 0 and 3 on node 0 it has hits 1 2 and belongs on 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.parallel.partition import partition


def contiguous(layers: int, experts: int, parts: int) -> np.ndarray:
    """Experts in blocks, as transformers' plan lays them out: int64 [L, E] of parts."""
    return np.tile(np.arange(experts) * parts // experts, (layers, 1))


def node_hits(routes_T_L_K: np.ndarray, node_L_E: np.ndarray, nodes: int) -> np.ndarray:
    """(token, layer) pairs of a row that need each node: int64 [N]."""
    at = node_L_E[np.arange(len(node_L_E))[:, None], routes_T_L_K]
    return np.array([(at == node).any(-1).sum() for node in range(nodes)])


def slow_copies(hits_R_N: np.ndarray, node_R: np.ndarray) -> int:
    """Copies of tokens that cross between nodes, each way, all layers together, with row r on node_R[r]."""
    return int(hits_R_N.sum() - hits_R_N[np.arange(len(node_R)), node_R].sum())


def assigned(
    hits_R_N: np.ndarray, costs: Sequence[int], ranks: int, width: int, tolerance: float = 0.02,
) -> list[list[int]]:
    """Rows of each rank so that few copies cross: `partition`, then the best exchange of two rows of different nodes, or move
    of one row, again and again. No rank costs more than the dearest of `partition`, or 1 + tolerance of the mean.
    """
    cost_R, rank_R = np.array(costs, float), np.zeros(len(costs), int)
    for rank, part in enumerate(partition(costs, ranks)):
        rank_R[part] = rank
    load = np.bincount(rank_R, cost_R, ranks)
    limit = max(load.max(), (1 + tolerance) * load.mean())
    rows = np.arange(len(costs))
    while len(rows):
        node_R = rank_R // width
        gain_R_N = hits_R_N - hits_R_N[rows, node_R][:, None]
        swap = gain_R_N[:, node_R] + gain_R_N[:, node_R].T
        after = load[rank_R][None, :] - cost_R[None, :] + cost_R[:, None]  # of the rank that i goes to, in place of j
        swap = np.where((np.maximum(after, after.T) <= limit), swap, -1)
        move = np.where(load[None, :] + cost_R[:, None] <= limit, gain_R_N[:, np.arange(ranks) // width], -1)
        if max(swap.max(), move.max()) <= 0:
            break
        if swap.max() >= move.max():
            i, j = np.unravel_index(swap.argmax(), swap.shape)
            rank_R[i], rank_R[j] = rank_R[j], rank_R[i]
        else:
            i, to = np.unravel_index(move.argmax(), move.shape)
            rank_R[i] = to
        load = np.bincount(rank_R, cost_R, ranks)
    return [rows[rank_R == rank].tolist() for rank in range(ranks)]


def by_topic(shares_R_F: np.ndarray, costs: Sequence[int], ranks: int, width: int) -> list[list[int]]:
    """Rows of each rank so that rows of a node are alike: halved by the direction in which they differ most, as often as there
    are nodes (a power of two), at half of the costs; then by cost to the ranks of a node. `shares_R_F`: any features of rows.
    """
    cost_R = np.array(costs, float)

    def halved(rows: np.ndarray, parts: int) -> list[np.ndarray]:
        if parts == 1:
            return [rows]
        centred = shares_R_F[rows] - shares_R_F[rows].mean(0)
        ordered = rows[np.argsort(centred @ np.linalg.svd(centred, full_matrices=False)[2][0], kind="stable")]
        total = np.cumsum(cost_R[ordered])
        middle = int(np.searchsorted(total, total[-1] / 2))
        return halved(ordered[:middle], parts // 2) + halved(ordered[middle:], parts // 2)

    return [
        sorted(int(rows[i]) for i in part)
        for rows in halved(np.arange(len(costs)), ranks // width) for part in partition(cost_R[rows].tolist(), width)]


def placed_on_nodes(
    ids_P_K: np.ndarray, home_P: np.ndarray, node_E: np.ndarray, nodes: int, tolerance: float = 0.08,
) -> np.ndarray:
    """Nodes of one layer's experts so that few copies cross, from `node_E` on: int64 [E], as many experts on each as before.

    Exchanges the two experts of different nodes that save most copies, until none saves; while a node is busier than 1 +
    tolerance of the mean, the two that cost fewest of those that bring it down. `home_P` is the node of each token.
    """
    node_E, experts = node_E.copy(), len(node_E)
    here_P_E = np.zeros((len(ids_P_K), experts), np.float32)
    np.put_along_axis(here_P_E, ids_P_K, 1.0, 1)
    away_P_N = home_P[:, None] != np.arange(nodes)
    load_E = here_P_E.sum(0)
    limit = (1 + tolerance) * load_E.sum() / nodes
    while True:
        load = np.bincount(node_E, load_E, nodes)
        after = load[node_E][None, :] - load_E[None, :] + load_E[:, None]  # of the node that i goes to, in place of j
        after, other = np.maximum(after, after.T), node_E[:, None] != node_E
        allowed, down = other & (after <= limit), load.max() > limit
        if down:
            allowed = other & (node_E == load.argmax())[:, None] & (after < load.max())
            if not allowed.any():
                limit = load.max()  # of an expert that alone is too much
                continue
            allowed &= after <= max(limit, after[allowed].min())
        saved = np.where(allowed, saved_by_exchange(here_P_E, away_P_N, node_E), -np.inf)
        i, j = np.unravel_index(saved.argmax(), saved.shape)
        if saved[i, j] <= 0 and not down:
            return node_E
        node_E[i], node_E[j] = node_E[j], node_E[i]


def saved_by_exchange(here_P_E: np.ndarray, away_P_N: np.ndarray, node_E: np.ndarray) -> np.ndarray:
    """Copies that each exchange of two experts of different nodes saves: [E, E]. `here_P_E`: 1 where a token has an expert,
    `away_P_N`: whether a node is not the token's own.
    """
    count_P_N = here_P_E @ np.eye(away_P_N.shape[1], dtype=np.float32)[node_E]
    alone_P_E = here_P_E * ((count_P_N == 1) & away_P_N)[:, node_E]  # its leaving saves a copy ...
    both = alone_P_E.T @ here_P_E  # ... unless the other one, which comes, is of the same token
    joins_E_N = here_P_E.T @ ((count_P_N == 0) & away_P_N).astype(np.float32)
    saved = alone_P_E.sum(0)[:, None] - both - joins_E_N[:, node_E]
    return saved + saved.T


def placed_on_ranks(load_E: np.ndarray, node_E: np.ndarray, width: int) -> np.ndarray:
    """Ranks of one layer's experts within their nodes, equally many on each and about equally busy: int64 [E].

    The busiest expert first, to the least busy rank with room; then exchanges as long as the busier rank of two gets less.
    """
    rank_E = np.zeros(len(node_E), int)
    for node in np.unique(node_E):
        members = np.flatnonzero(node_E == node)
        room, busy = np.full(width, len(members) // width), np.zeros(width)
        place = {}
        for expert in members[np.argsort(-load_E[members], kind="stable")]:
            to = min((r for r in range(width) if room[r]), key=lambda r: (busy[r], r))
            place[expert], room[to], busy[to] = to, room[to] - 1, busy[to] + load_E[expert]
        _evened(place, busy, load_E)
        for expert, to in place.items():
            rank_E[expert] = node * width + to
    return rank_E


def _evened(place: dict[int, int], busy: np.ndarray, load_E: np.ndarray) -> None:
    """Exchange experts of the busiest and the least busy rank while that helps."""
    while True:
        high, low = int(busy.argmax()), int(busy.argmin())
        half = (busy[high] - busy[low]) / 2
        pairs = [
            (abs(half - (load_E[a] - load_E[b])), a, b) for a in place if place[a] == high for b in place if place[b] == low]
        best = min(pairs, default=(half, 0, 0))
        if best[0] >= half - 1e-9:
            return
        _, a, b = best
        place[a], place[b] = low, high
        busy[high] += load_E[b] - load_E[a]
        busy[low] += load_E[a] - load_E[b]


def load_of(ids_P_K: np.ndarray, experts: int) -> np.ndarray:
    """(token, expert) pairs of each expert of a layer: int64 [E]."""
    return np.bincount(ids_P_K.reshape(-1), minlength=experts)


def max_over_mean(load_E: np.ndarray, rank_E: np.ndarray, ranks: int) -> float:
    """The busiest rank's (token, expert) pairs over the mean."""
    load = np.bincount(rank_E, load_E, ranks)
    return float(load.max() / load.mean())
