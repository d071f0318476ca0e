"""An environment whose exceptions quote the prompt, as users' code does."""

from __future__ import annotations

from slipstream.environment import Action, Episode, Step
from slipstream.environments.sort_digits import SortDigits


class Quoting(SortDigits):
    """Sort digits; every third task's step raises with the prompt and the answer in its message."""

    def step(self, episode: Episode, action: Action) -> Step:
        if episode.task.index % 3 == 0:
            raise ValueError(f"no idea about {episode.reset.text} and {action.text!r}")
        return super().step(episode, action)  # type: ignore[return-value]
