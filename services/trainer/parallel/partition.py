"""Rows of a batch to ranks, by what they cost: a pure function, so that every rank comes to the same.

A row of T tokens costs about T · (T + 6 H): attention grows with T², everything else with H · T, in the ratio 4 H T² to
24 H² T of a transformer layer of 12 H² weights.
"""

from __future__ import annotations

from collections.abc import Sequence


def cost(tokens: int, hidden: int) -> int:
    """Of a row of `tokens`, in units that only compare."""
    return tokens * (tokens + 6 * hidden)


def partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the rows of each rank: the dearest first, each to the rank with the least so far (at most 4/3 of the best)."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(parts[r]), r))
        parts[rank].append(index)
        loads[rank] += costs[index]
    return [sorted(part) for part in parts]
