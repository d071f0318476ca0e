"""Sort digits: "3141=" → "1134". Procedural, one turn, exact match; learnable from scratch by half a million parameters."""

from __future__ import annotations

import functools

from slipstream.environment import Environment, Reset, Task
from slipstream.errors import ConfigError


class SortDigits(Environment):
    """Prompts of `shortest` to `longest` digits and "=". An answer that never stops is wrong, whatever it contains."""

    scorer = "exact"
    truncated_is_wrong = True
    inline = True

    def __init__(self, shortest: int = 4, longest: int = 8) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigError(f"environments.args: shortest = {shortest}, longest = {longest}; 1 <= shortest <= longest needed")
        self.shortest, self.longest = shortest, longest

    def reset(self, task: Task) -> Reset:
        prompt, answer = _problem(task, self.shortest, self.longest)
        return Reset(prompt, answer=answer)


@functools.lru_cache(1024)  # the samples of a group have one task, and a seeded generator costs as much as all the rest
def _problem(task: Task, shortest: int, longest: int) -> tuple[str, str]:
    random = task.random
    digits = random.choices("0123456789", k=random.randint(shortest, longest))
    return "".join(digits) + "=", "".join(sorted(digits))
