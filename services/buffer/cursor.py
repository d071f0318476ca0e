"""The task cursor: which task draw d takes. Pure functions of (run seed, draw, how often the environment was drawn before).

The counts live in the ledger; a front only proposes the next draws, and the ledger takes the proposal when it is still the
next one. So any number of fronts give the same sequence.

Example: two environments of weights 3 and 1 get a seeded mix near A A B A …; the tasks of A come in a seeded order, all of
them once before any comes twice, and each epoch in another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slipstream import seeds


class TaskCursor:
    """`tasks` is the number of tasks of each environment; 0 = procedural, the index is the count itself."""

    def __init__(self, seed: int, weights: Mapping[str, float], tasks: Mapping[str, int]) -> None:
        self._seed, self._tasks = seed, dict(tasks)
        total, sum_ = sum(weights.values()), 0.0
        self._bounds: list[tuple[float, str]] = []
        for name, weight in weights.items():
            sum_ += weight / total
            self._bounds.append((sum_, name))

    def environment(self, draw: int) -> str:
        """Environment of a draw."""
        if len(self._bounds) == 1:
            return self._bounds[0][1]
        u = seeds.stream(self._seed, "mix", draw) / 2**64
        return next((name for bound, name in self._bounds if u < bound), self._bounds[-1][1])

    def index(self, environment: str, count: int) -> int:
        """Task index of the count-th draw (0-based) of an environment."""
        if not (size := self._tasks.get(environment, 0)):
            return count
        return permute(count % size, size, seeds.stream(self._seed, "order/" + environment, count // size))

    def proposals(self, draw: int, counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """(environment, index) of `draw`, `draw` + 1, … given the counts before `draw`."""
        counts = dict(counts)
        while True:
            name = self.environment(draw)
            yield name, self.index(name, counts.get(name, 0))
            counts[name] = counts.get(name, 0) + 1
            draw += 1

    def counts_before(self, draw: int) -> dict[str, int]:
        """How often each environment was drawn before `draw`, computed from the mix alone."""
        counts = {name: 0 for _, name in self._bounds}
        for d in range(draw):
            counts[self.environment(d)] += 1
        return counts


def permute(position: int, size: int, seed: int) -> int:
    """A seeded permutation of range(size) at `position`, in O(1) memory: a four-round Feistel network, cycle-walking."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for round_ in range(4):
            left, right = right, left ^ (seeds.mix(seed ^ (round_ << 60) ^ right) & mask)
        position = (left << half) | right
        if position < size:
            return position
