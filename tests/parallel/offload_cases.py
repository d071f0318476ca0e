"""A sharded learner that leaves its device between steps: what stays there, and whether anybody can tell."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch

from services.trainer.parallel.learner import ShardedLearner
from tests.parallel.learner_cases import arrays, run
from tests.stand_in_device import StandIn
from tests.trainer_samples import groups


def turns(family: str, parallel: dict[str, Any]) -> dict[str, Any]:
    """On a rank: bytes on the device in a turn and away, twice; whether weights and moments are those of one that stayed."""
    stays, leaves, device = ShardedLearner(run(family, parallel)), ShardedLearner(run(family, parallel)), StandIn()
    leaves.ranks.accelerator = device
    device.adopt(*leaves.ranks._offload._models)
    whole, away, same = device.bytes, [], True
    for step in (1, 2):
        with device.watching():
            leaves.step(groups(5, seed=step), step)
            leaves.leave_device()
        gc.collect()
        away.append(device.bytes)
        snapshot = leaves.snapshot()  # from host memory
        with device.watching():
            leaves.enter_device()
        stays.step(groups(5, seed=step), step)
        expected = stays.snapshot()
        for found, wanted in ((snapshot.weights, expected.weights), (snapshot.optimizer, expected.optimizer)):
            same = same and found.keys() == wanted.keys() and all(
                torch.equal(_own(found[name]), _own(wanted[name])) for name in wanted)
    published, wanted = arrays(leaves.weights()), arrays(stays.weights())
    same = same and all(np.array_equal(published[name], wanted[name]) for name in wanted)
    return {"whole": whole, "away": away, "back": device.bytes, "same": same}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore
