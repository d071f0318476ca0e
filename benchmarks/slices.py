"""Programs that run by turns on one machine, for a slice each: what disturbs the machine disturbs them alike.

An arm is a program with a step log, a file with a line of JSON a step that tells `time_unix`. Outside its slices all of its
processes stand still (SIGSTOP), so its clock, the sum of its slices, goes on only while it runs. Deadlines and timers of the
program do not know that: a slice times the number of arms must stay below the shortest deadline of a call, and a timer fires at
most once a slice.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
START_S = 180.0
POLL_S = 0.05


class Arm:
    """One program, started by the first `thaw`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, **environment: str) -> None:
        self.name, self._command, self._log = name, command, log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._slices: list[tuple[float, float]] = []  # (begin, end) by the wall clock
        self._began = 0.0

    def thaw(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            self._signal(signal.SIGCONT)
        self._began = time.time()

    def freeze(self) -> None:
        """Raises RuntimeError when the program has ended."""
        self._slices.append((self._began, time.time()))
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.name}: ended with {self._process.returncode} after {len(self.log())} steps")
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def log(self) -> list[dict[str, Any]]:
        """The step log so far."""
        if not self._log.exists():
            return []
        *lines, _unfinished = self._log.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def clock(self) -> np.ndarray:
        """Seconds that the program had run when each step was done, by its own clock: float [steps]."""
        begins, ends = np.array(self._slices).T
        before = np.concatenate([[0.0], np.cumsum(ends - begins)])
        wall = np.array([line["time_unix"] for line in self.log()])
        at = np.maximum(np.searchsorted(begins, wall, "right") - 1, 0)
        return before[at] + np.minimum(wall, ends[at]) - begins[at]

    def _signal(self, number: int) -> None:
        assert self._process is not None
        family = [self._process.pid]
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
        parents = {int(pid): int(parent) for pid, parent in map(str.split, listed.splitlines())}
        for member in family:
            family += [pid for pid, parent in parents.items() if parent == member]
        for pid in family if number == signal.SIGSTOP else reversed(family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def started(arms: Sequence[Arm], skip: int) -> Iterator[None]:
    """Each arm, one after the other, runs until it has done `skip` steps. At the end all are killed."""
    try:
        for arm in arms:
            arm.thaw()
            until = time.monotonic() + START_S
            while len(arm.log()) < skip:
                if time.monotonic() > until:
                    raise RuntimeError(f"{arm.name}: {len(arm.log())} steps within {START_S:.0f} s, not {skip}")
                time.sleep(POLL_S)
            arm.freeze()
        yield
    finally:
        for arm in arms:
            arm.end()


def take_turns(arms: Sequence[Arm], seconds: float, steps: int) -> None:
    """A slice for each, again and again, until all have done so many steps."""
    while going := [arm for arm in arms if len(arm.log()) < steps]:
        for arm in going:
            arm.thaw()
            time.sleep(seconds)
            arm.freeze()
