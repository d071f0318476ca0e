"""Is a process getting on? What counts as progress is each service's own; a stall is its absence while something is awaited.

    service   progress                                            awaited
    buffer    a sample scored, a batch numbered, committed or      the next batch, until all are committed
              published; leases that are kept alive excuse it
    trainer   a piece of torch work, a version, a checkpoint       the step in hand; a batch is the buffer's to await
    rollout   a token, an answer of an environment                 the samples in flight
    reward    a score                                              the samples in hand
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.lifecycle import Clock


class Progress:
    """Seconds since `marker()` last changed, and what `awaiting()` says is awaited ("" = nothing, so no stall).

    Example:
        progress = Progress(clock, lambda: loop.step, lambda: f"step {loop.step + 1}")
        progress.look()         # again and again
        progress.age_s, progress.awaited
    """

    def __init__(self, clock: Clock, marker: Callable[[], object], awaiting: Callable[[], str]) -> None:
        self._clock, self._marker, self._awaiting = clock, marker, awaiting
        self._seen: object = None
        self._changed = self._busy_since = clock.monotonic()

    def look(self) -> None:
        """Compare the marker with the last one. A look that finds nothing awaited starts the count of a stall anew."""
        now, marker = self._clock.monotonic(), self._marker()
        if marker != self._seen:
            self._seen, self._changed = marker, now
        if not self._awaiting():
            self._busy_since = now

    @property
    def age_s(self) -> float:
        """Seconds since the marker changed, whether anything is awaited or not."""
        return self._clock.monotonic() - self._changed

    @property
    def awaited(self) -> tuple[str, float]:
        """What is awaited and for how long without progress; ("", 0.0) when nothing is."""
        sentence = self._awaiting()
        return (sentence, self._clock.monotonic() - max(self._changed, self._busy_since)) if sentence else ("", 0.0)
