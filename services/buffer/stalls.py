"""Does the run get on, and if not, what is missing? The buffer sees all of it, so it answers for the whole run.

Progress is a sample that was scored, a batch that was numbered or committed, a version that was published. Failing samples and
leases that are granted again are none: a fleet that crashes or whose environment is gone makes them without end.

A long generation is no stall: while workers keep leases alive, no lease lapsed and no sample failed since the last progress,
time does not count. (A worker whose engine hangs stops keeping its leases alive.)
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.buffer.front import Front
from services.buffer.ledger import Balance

HEARD_S = 30.0  # long polls last up to 20 s, so whoever is there calls at least this often


class Stalls:
    """What the last look at the ledger says. `marker` and `awaiting` are for ServiceContext.judge_progress."""

    def __init__(self, front: Front, lease_s: float) -> None:
        self._front, self._lease_s = front, lease_s
        self._meta: dict[str, Any] = {}
        self._samples: dict[str, int] = {}
        self._progress: tuple[int, ...] = ()
        self._faults: tuple[int, ...] = ()  # as of the last progress
        self._excused = 0
        self.unreachable = ""  # why the ledger cannot be asked

    def look(self, balance: Balance) -> None:
        """Take in a fresh balance."""
        meta, samples = self._meta, self._samples = dict(balance.meta), dict(balance.samples)
        self.unreachable = ""
        done = samples.get("scored", 0)
        progress = (
            done, done + samples.get("unscored", 0) + samples.get("scoring", 0), meta.get("numbered", 0),
            meta.get("committed", 0), meta.get("published", -1), meta.get("version", 0), meta.get("incarnation", 0))
        faults = (meta.get("expired", 0), samples.get("closed", 0))
        if progress != self._progress:
            self._progress, self._faults = progress, faults
        elif faults == self._faults and samples.get("leased", 0) and self._kept_alive:
            self._excused += 1

    @property
    def marker(self) -> object:
        return self._progress, self._excused

    @property
    def _kept_alive(self) -> bool:
        return asyncio.get_running_loop().time() - self._front.leases_kept < self._lease_s

    def awaiting(self) -> str:
        """What the run waits for, and who is missing for it; "" when every batch is committed."""
        meta, rules, front = self._meta, self._front.ledger.rules, self._front
        if self.unreachable:
            return self.unreachable
        if not meta or meta.get("committed", 0) >= rules.steps:
            return ""
        trainer = front.connected("trainer", HEARD_S)
        if meta.get("published", -1) < 0:
            who = "the trainer has not published one" if meta.get("incarnation", 0) else "no trainer has connected"
            return f"the first policy version: {who}"
        batch, numbered = front.waiting.get("trainer"), meta.get("numbered", 0)
        if batch and trainer:
            return "; ".join([batch, *self._missing()])
        if numbered > meta.get("committed", 0) and (batch is None or numbered >= rules.steps):
            return f"the trainer, to train and commit batch {numbered}"
        return f"batch {numbered + 1}: no trainer asks for it"

    def _missing(self) -> list[str]:
        """Who would have to work for the next batch and is not there, or fails."""
        front, samples = self._front, self._samples
        missing, budget = [], front.waiting.get("rollout")
        if not front.connected("rollout", max(HEARD_S, self._lease_s)):
            missing.append("no rollout worker is connected")
        elif budget and not samples.get("leased", 0):
            missing.append(f"rollout workers wait for {budget}")
        waiting = samples.get("unscored", 0) + samples.get("scoring", 0)
        if waiting and not front.connected("reward", HEARD_S):
            missing.append(f"{waiting} samples wait for a score and no reward worker is connected")
        lapsed, failed = (now - then for now, then in zip(
            (self._meta.get("expired", 0), samples.get("closed", 0)), self._faults or (0, 0), strict=True))
        if failed:
            missing.append(f"{failed} samples were closed without a score meanwhile (`slipstream ledger --dead` says why)")
        if lapsed:
            missing.append(f"{lapsed} leases lapsed meanwhile: their workers were silent")
        return missing
