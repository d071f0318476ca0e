"""Two faults planted in the behaviour of a real service, so that the audit can be seen to fail.

    repeat    the trainer applies every tenth batch twice
    loss      the buffer forgets one acknowledged sample of every tenth batch when it writes the composition
"""

from __future__ import annotations

import dataclasses
from typing import Any

PLANTS = ("repeat", "loss")
EVERY = 10  # batches; one alone could fall to a crash whose resume trains the batch properly


def apply(plant: str, service: str) -> bool:
    """Change the class behind `service`. False when the plant is in another service."""
    if plant == "repeat" and service == "trainer":
        _train_twice()
    elif plant == "loss" and service == "buffer":
        _forget_a_sample()
    else:
        return False
    return True


def _train_twice() -> None:
    from services.trainer.loop import TrainerLoop

    once = TrainerLoop._apply

    def apply_twice(self: Any, batch: Any, *arguments: Any) -> Any:
        if batch.number % EVERY == 0:
            once(self, batch, *arguments)
        return once(self, batch, *arguments)

    TrainerLoop._apply = apply_twice  # pyright: ignore[reportAttributeAccessIssue]


def _forget_a_sample() -> None:
    from services.buffer.redis_ledger import RedisLedger

    whole = RedisLedger.read_batch

    async def forgetful(self: Any, batch: int) -> Any:
        composition = await whole(self, batch)
        if batch % EVERY:
            return composition
        first, *others = composition.groups
        return dataclasses.replace(
            composition, groups=[dataclasses.replace(first, members=first.members[:-1]), *others])

    RedisLedger.read_batch = forgetful
