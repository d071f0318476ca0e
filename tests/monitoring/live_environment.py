"""An environment of which one task in twenty fails, so that what counts failures has something to count."""

from __future__ import annotations

from slipstream.environment import Reset, Task
from slipstream.environments.sort_digits import SortDigits


class Failing(SortDigits):
    """Sort digits, mostly."""

    def reset(self, task: Task) -> Reset:
        if task.index % 20 == 3:
            raise ValueError("on purpose")
        return super().reset(task)
