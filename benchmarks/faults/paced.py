"""The task of a chaos run: sort digits, slowly and not always successfully.

While the file `pace_file` exists an episode takes up to `pace_s` and a score 150 ms, so that every fault finds samples in every
state and the run does not end before the faults do. Which episodes fail, and every score, is a function of what the
model said alone: with deterministic kernels the same samples fail whoever plays them and however often.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from pathlib import Path

from slipstream.environment import Action, Episode, Reset, Step, Task
from slipstream.environments.sort_digits import SortDigits

SCORE_S = 0.15
HOPELESS = 40


class PacedSort(SortDigits):
    """Sort digits. One answer in `fail_every`, and every answer to one task in forty, makes the episode fail."""

    truncated_is_wrong = False

    def __init__(self, pace_file: str = "", pace_s: float = 0.0, fail_every: int = 12) -> None:
        super().__init__(3, 5)
        self.pace_file, self.pace_s, self.fail_every = Path(pace_file), pace_s, fail_every

    def reset(self, task: Task) -> Reset:
        reset = super().reset(task)
        reset.info = {"pace_file": str(self.pace_file)}
        return reset

    async def step(self, episode: Episode, action: Action) -> Step:
        said = zlib.crc32(f"{episode.reset.text}{action.text}".encode())
        if self.pace_s and self.pace_file.exists():
            await asyncio.sleep(self.pace_s * (said % 100) / 100)
        if said % self.fail_every == 0 or zlib.crc32((episode.reset.text or "").encode()) % HOPELESS == 0:
            raise ValueError("this answer breaks the environment")
        if said % 3 == 0:  # some episodes bring their reward along, others are scored by the reward service
            return Step(done=True, reward=even_share(action.text))
        return Step(done=True)


def even_share(response: str) -> float:
    """A reward that a random model already gets some of: the share of even digits."""
    return sum(c in "02468" for c in response) / max(len(response), 1)


def slow_even_share(prompt: str, response: str, answer: str, info: dict) -> float:
    """`even_share` as a scorer that takes its time while the run is disturbed."""
    if Path(info["pace_file"]).exists():
        time.sleep(SCORE_S)
    return even_share(response)
