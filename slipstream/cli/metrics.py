"""The trainer's metrics.jsonl, read as it grows.

One JSON object per optimizer step: step, reward_mean, tokens, tokens_per_s, lag_mean, lag_max, gap_mean, gap_max, loss, ...,
incarnation. A restarted trainer replaces the file by one without the steps that it trains again; where a step has several
lines, the last one counts.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WINDOW = 10  # steps of the mean reward that is shown and judged


class Metrics:
    """Rows by step. `poll()` reads what was added since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[int, dict[str, Any]] = {}
        self._offset, self._inode = 0, 0
        self._incarnation = 0
        self._rewards: list[float] | None = None

    def poll(self) -> list[int]:
        """Steps that were written since the last call, in order."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self.rows, self._rewards = found.st_ino, 0, {}, None
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[:data.rfind(b"\n") + 1]
        self._offset += len(complete)
        steps = []
        for line in complete.splitlines():
            row = parse(line)
            if row is not None and isinstance(row.get("step"), int):
                self._add(row["step"], row)
                steps.append(row["step"])
        return steps

    def _add(self, step: int, row: dict[str, Any]) -> None:
        incarnation = int(row.get("incarnation", 0))
        if incarnation > self._incarnation:
            self._incarnation = incarnation
            self.rows = {s: r for s, r in self.rows.items() if s < step}
        self.rows[step] = row  # steps come in order, so the dictionary stays sorted
        self._rewards = None

    @property
    def last(self) -> dict[str, Any]:
        """Row of the newest step; empty before the first."""
        return next(reversed(self.rows.values()), {})

    @property
    def step(self) -> int:
        return next(reversed(self.rows), 0)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step, in order; steps without one are left out."""
        if self._rewards is None:
            self._rewards = [float(r["reward_mean"]) for r in self.rows.values() if r.get("reward_mean") is not None]
        return self._rewards

    def mean(self, name: str, window: int = WINDOW) -> float | None:
        """Mean of a figure over the newest steps that have it."""
        newest = itertools.islice(reversed(self.rows.values()), window)
        values = [float(v) for r in newest if (v := r.get(name)) is not None]
        return sum(values) / len(values) if values else None

    @property
    def seconds_per_step(self) -> float | None:
        """Wall time of a step over the newest twenty; None before the second."""
        times = [float(t) for r in itertools.islice(reversed(self.rows.values()), 20) if (t := r.get("time_unix")) is not None]
        return (times[0] - times[-1]) / (len(times) - 1) if len(times) > 1 and times[0] > times[-1] else None

    @property
    def first_and_last_reward(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last ten steps; None before the first step."""
        rewards = self.rewards
        if not rewards:
            return None
        first, last = rewards[:WINDOW], rewards[-WINDOW:]
        return sum(first) / len(first), sum(last) / len(last)


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line. A writer killed in the middle of one leaves a torn start, which the next line then follows."""
    for start in {0, max(line.rfind(b'{"'), 0)}:
        try:
            row = json.loads(line[start:])
        except ValueError:
            continue
        return row if isinstance(row, dict) else None
    return None


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of blocks, the mean of each bucket, scaled from their lowest to their highest.

    >>> sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    blocks = "▁▂▃▄▅▆▇█"
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((m - low) * scale)] for m in means)
