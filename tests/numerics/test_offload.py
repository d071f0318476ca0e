"""Between two turns nothing of the trainer is on the device, and its weights are those of a trainer that never left."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from services.trainer.learner import Learner
from services.trainer.snapshot import Snapshot
from tests.stand_in_device import StandIn
from tests.trainer_samples import groups, run_file

COUNTERS = 4096  # bytes: tokens per expert, and nothing that grows with the model
PLAIN: dict[str, Any] = {}
CRITIC: dict[str, Any] = {"algorithm": {"preset": "grpo", "advantage": "gae", "kl": "k2", "kl_coefficient": 0.1}}


def on(device: StandIn, sections: dict[str, Any]) -> Learner:
    """A learner whose models are on the stand-in device."""
    with device.watching():
        learner = Learner(run_file(**sections))
        if learner.run.algorithm.kl != "none":
            learner.start_reference()
    learner.ranks.accelerator = device
    return learner


def moments(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    return snapshot.weights | snapshot.optimizer | snapshot.critic | snapshot.critic_optimizer


@pytest.mark.parametrize("sections", [PLAIN, CRITIC], ids=["policy", "policy, reference and critic"])
def test_away_it_holds_nothing_and_goes_on_with_the_same_bits(sections: dict[str, Any]) -> None:
    """Three steps with a turn away after each: bytes of the device away, snapshots taken away, weights and moments after."""
    device, other = StandIn(), Learner(run_file(**sections))
    if sections:
        other.start_reference()
    learner = on(device, sections)
    whole = device.bytes
    assert whole > 100_000
    for step in range(1, 4):
        with device.watching():
            learner.step(groups(step=step - 1, seed=step), step)
            learner.leave_device()
        gc.collect()
        assert device.bytes <= COUNTERS, device.live[:8]
        other.step(groups(step=step - 1, seed=step), step)
        found, expected = moments(learner.snapshot()), moments(other.snapshot())
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(bytes(a.data) == bytes(b.data) for a, b in zip(learner.weights(), other.weights(), strict=True))
        with device.watching():
            learner.enter_device()
        assert device.bytes >= whole
    snapshot = learner.snapshot()
    moving = [t for t in (snapshot.optimizer | snapshot.critic_optimizer).values() if t.numel() > 1]
    assert device.bytes >= whole + sum(t.nbytes for t in moving)  # the moments came, too


def test_on_a_cpu_nothing_moves() -> None:
    """Host memory is the device: a turn costs a laptop no copy."""
    learner = Learner(run_file())
    before = {name: p.data_ptr() for name, p in learner.model.named_parameters()}
    learner.leave_device()
    learner.enter_device()
    assert before == {name: p.data_ptr() for name, p in learner.model.named_parameters()}
