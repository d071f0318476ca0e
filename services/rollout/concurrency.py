"""How many samples a worker holds at once, from the engine's own signals: as many as its cache has room for.

An engine that is given more than fits throws out what it has begun (a preemption) and computes it again later; given less, its
batches are small. Both cost tokens per second, and what fits depends on how long answers get, which changes as a run goes on.

What fits is known at every look, from the share of the cache that a request takes. The engine says it as a mean over its last
steps: requests begin and end in waves, and one step's share over one step's number is off by half.

Rule: under pressure (preemptions, or requests that wait while the cache is nearly full) fall to what fits; else, when the bound
is what holds the worker back and there is room, go half of the way to what fits, a quarter of the bound at most, a sixteenth at
least, so that it also finds out when more fits than that. It begins at the most: where everything fits, nothing is bounded.

After a fall the worker still has what it took on before: pressure until that is done says nothing of the new bound, which
then follows what fits alone. (Falling at every look all the same, by what one step saw, took it to half of what fits.)
"""

from __future__ import annotations

from dataclasses import dataclass

FULL, ROOMY = 0.95, 0.85  # shares of the cache: from the first on waiting is pressure, below the second there is room
AIM = 1.0  # the share we go for: so much that now and then one waits, which then follows at once on one that ends
GROW, LEAP = 16, 4
HELD = 4  # a worker that holds less than the bound but for this share is not held back by it: it asks for leases in lots
SETTLE = 2  # looks after a load: it preempts everything, which says nothing about room


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that were guessed and judged, in sums since the start."""

    made: int = 0  # one a request and step that had something to guess
    tokens: int = 0
    accepted: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class Load:
    """The engine at one look."""

    running: int  # requests that the last step decoded
    waiting: int  # without room
    cache_share: float  # of the cache in use, 0 to 1
    preemptions: int  # in sum
    loads: int  # weights exchanged, in sum
    each: float = 0.0  # share of the cache that a request takes, over the last steps; 0 = as in the last one
    drafts: Drafts = Drafts()


class Concurrency:
    """`limit`, between `least` and `most`. Pure: no clock; `look` is called at even intervals."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.most, self.least, self.limit = most, min(least, most), most
        self._before: Load | None = None
        self._settling = 0

    def look(self, load: Load, in_hand: int = 0) -> int:
        """Take note of the engine and of the samples that the worker holds, there or at environments; the new limit."""
        before, self._before = self._before, load
        if before is None or load.loads != before.loads:
            self._settling = SETTLE if before is not None else 0
            return self.limit
        if self._settling:
            self._settling -= 1
            return self.limit
        if not load.running:
            return self.limit
        asked = load.running + load.waiting
        in_hand = max(in_hand, asked)
        fits = AIM / max(load.each or load.cache_share / load.running, 1e-9)  # requests in the engine
        if load.preemptions > before.preemptions or (load.waiting > 0 and load.cache_share >= FULL):
            done = in_hand <= self.limit  # with what was taken on before the last fall
            self.limit = max(self.least, min(self.limit - done, int(fits * in_hand / asked)))
        elif not load.waiting and load.cache_share < ROOMY and in_hand >= self.limit - self.limit // HELD - 1:
            step = max(self.limit // GROW, min(int(fits - self.limit) // 2, self.limit // LEAP), 1)
            self.limit = min(self.most, self.limit + step)
        return self.limit
