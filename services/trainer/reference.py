"""The reference model of a KL term: a directory, or the weights of step 0, at every start of a trainer and in a replay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from slipstream.model import bare


async def start_reference(learner: Learner, checkpoints: Checkpoints, in_torch: Callable[..., Awaitable[Any]]) -> None:
    """Give the learner its reference model, if it needs one. Before the first checkpoint, the weights of now are the first.

    That of an adapter is its base, which no checkpoint holds.
    """
    algorithm = learner.run.algorithm
    if algorithm.kl == "none":
        return
    first = None
    if not algorithm.reference and learner.adapter is None and (steps := await checkpoints.steps()):
        _, snapshot = await checkpoints.load_at(steps[0])
        first = [bare(name, tensor) for name, tensor in snapshot.weights.items()]
    await in_torch(learner.start_reference, first)
