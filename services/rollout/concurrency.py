"""How many samples a worker holds at once, from the engine's own signals: as many as its cache has room for.

An engine that is given more than fits throws out what it has begun (a preemption) and computes it again later; given less, its
batches are small. Both cost tokens per second, and what fits depends on how long answers get, which changes as a run goes on.

Rule, at every look: under pressure (preemptions, or requests that wait while the cache is nearly full) fall to what fits at the
present size of requests; else, when the bound is what holds the worker back, grow by a sixteenth (additive increase,
multiplicative decrease: Chiu and Jain 1989, with the decrease measured instead of guessed). It begins at the most: where
everything fits, nothing is ever bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL, ROOMY = 0.95, 0.85  # shares of the cache: from the first on requests wait for room; below the second there is some
GROW = 16
SETTLE = 2  # looks after a load: it preempts everything, which says nothing about room


@dataclass(frozen=True, slots=True)
class Load:
    """The engine at one look."""

    running: int  # requests that the last step decoded
    waiting: int  # without room
    cache_share: float  # of the cache in use, 0 to 1
    preemptions: int  # in sum
    loads: int  # weights exchanged, in sum


class Concurrency:
    """`limit`, between `least` and `most`. Pure: no clock; `look` is called at even intervals."""

    def __init__(self, most: int, least: int = 1) -> None:
        self.most, self.least, self.limit = most, min(least, most), most
        self._before: Load | None = None
        self._settling = 0

    def look(self, load: Load) -> int:
        """Take note of the engine; the new limit."""
        before, self._before = self._before, load
        if before is None or load.loads != before.loads:
            self._settling = SETTLE if before is not None else 0
            return self.limit
        if self._settling:
            self._settling -= 1
            return self.limit
        pressed = load.preemptions > before.preemptions or (load.waiting > 0 and load.cache_share >= FULL)
        if pressed and load.running:
            fits = int(load.running * ROOMY / max(load.cache_share, 1e-3)) if load.cache_share > ROOMY else load.running
            self.limit = max(self.least, min(self.limit - 1, fits))
        elif not load.waiting and load.cache_share < ROOMY and load.running >= self.limit - self.limit // GROW - 1:
            self.limit = min(self.most, self.limit + max(1, self.limit // GROW))
        return self.limit
