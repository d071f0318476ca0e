"""Watches whether the run gets on, for the supervisor: says when it does not, and after service.give_up_s ends it.

Consumes: GetStatus of every process, once every few seconds. Produces: one event when a stall begins and one when it ends; the
`stall` of supervisor.json; at last the error that ends the run. Waits for: nobody. Unblocked by: the clock.

A run gets on when its buffer does (a sample scored, a batch numbered or committed, a version published) or its trainer (a piece
of torch work, a version, a checkpoint): slipstream_progress_age_seconds of either. A process that is silent has not got on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.cli.survey import ServiceStatus

AGE = "progress_age_seconds"
LOOK_S = 2.0
NAMED = 4  # processes in a sentence
FINE = ("serving", "finished", "running", "")


@dataclass(frozen=True)
class Stall:
    """A run that does not get on: what it waits for, in one line, and for how long."""

    sentence: str
    seconds: float

    def __str__(self) -> str:
        return f"no progress for {self.seconds:.0f} s, waiting for {self.sentence}"


class StallWatch:
    """Judges one survey after the other. `now` is a monotonic clock."""

    def __init__(self, now: Callable[[], float], stall_s: float, give_up_s: float) -> None:
        self._now, self._stall_s, self._give_up_s = now, stall_s, give_up_s
        self._progressed = now()
        self.stall: Stall | None = None
        self.over = ""  # set once: the error with which the run is given up

    def look(self, services: Sequence[ServiceStatus]) -> str:
        """Take in one survey. Returns an event to tell, or ""."""
        now = self._now()
        ages = [s.figures[AGE] for s in services if s.service in ("buffer", "trainer") and AGE in s.figures]
        self._progressed = max([self._progressed, *(now - age for age in ages)])
        seconds, before = now - self._progressed, self.stall
        self.stall = Stall(awaited(services), seconds) if seconds > self._stall_s else None
        if self.stall is not None and self._give_up_s and seconds > self._give_up_s:
            self.over = f"given up: {self.stall} (service.give_up_s = {self._give_up_s:g}; 0 = wait for ever)"
        if self.stall is not None and before is None:
            return f"stalled: {self.stall}"
        if self.stall is None and before is not None:
            return f"no longer stalled, after {before.seconds:.0f} s"
        return ""


def awaited(services: Sequence[ServiceStatus]) -> str:
    """What the run waits for: the buffer's word for it, then whoever is not well.

    Example: "batch 3: 8 of 8 groups unfinished; no rollout worker is connected; rollout-0 is backing off"
    """
    buffer = next((s for s in services if s.service == "buffer"), None)
    if buffer is None or buffer.state not in ("serving", "stalled"):
        sentence = f"the buffer, which is {buffer.state or 'silent'}" if buffer is not None else "the buffer"
    else:
        sentence = buffer.waiting_for or "the trainer to end"
    others = [word for s in services if s.service not in ("buffer", "redis") and (word := _word(s))]
    more = [f"and {len(others) - NAMED} more"] if len(others) > NAMED else []
    return "; ".join([sentence, *others[:NAMED], *more])


def _word(service: ServiceStatus) -> str:
    """What is wrong with a process; "" when nothing is, as far as it knows."""
    if service.state not in (*FINE, "stalled"):
        return f"{service.instance} is {service.state}"
    if service.state == "stalled" or service.waiting_for.startswith(("a pause", "environment", "the trainer's start")):
        return f"{service.instance} waits for {service.waiting_for}"
    return ""
