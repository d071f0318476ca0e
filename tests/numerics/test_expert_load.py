"""What each expert got in a step, against transformers' own router outputs."""

from __future__ import annotations

import pytest
import torch

from services.trainer.learner import Learner
from services.trainer.packing import trained_rows
from tests.trainer_samples import FAMILIES, OBJECTIVE, groups, run_file


@pytest.mark.parametrize("family", FAMILIES)
def test_load_is_counted_over_the_step_without_padding(family):
    """Micro-batches of unequal rows give the counts of each row alone, by transformers' router logits and a topk; the reference
    pass and later forward passes do not count."""
    made = Learner(run_file(family=family, trainer={"tokens_per_microbatch": 40, "learning_rate": 0.0 + 1e-9}))
    batch = groups(seed=3)
    layers, experts, k = 2, 4, 2
    expected = torch.zeros(layers, experts)
    for row in trained_rows(batch, 1, OBJECTIVE):
        with torch.no_grad():
            out = made.model(input_ids=torch.from_numpy(row.inputs).long()[None], output_router_logits=True)
        for layer, logits in enumerate(out.router_logits):
            expected[layer] += torch.bincount(logits.topk(k, -1).indices.reshape(-1), minlength=experts)
    metrics = made.step(batch, 1)
    assert torch.equal(torch.stack(made.policy.load.tokens()).float(), expected)
    loads = (expected.max(1).values / expected.mean(1)).tolist()
    assert metrics["expert_load_max"] == pytest.approx(max(loads))
    assert metrics["expert_load_mean"] == pytest.approx(sum(loads) / 2)
    assert metrics["dead_experts"] == int((expected == 0).sum())


def test_experts_without_tokens_are_counted():
    """A router that sends everything to two experts leaves two of four dead in its layer; the busiest has twice the mean."""
    made = Learner(run_file())
    router = next(m for n, m in made.model.named_modules() if n.endswith("layers.0.mlp.gate"))
    with torch.no_grad():
        router.weight.zero_()  # pyright: ignore
    metrics = made.step(groups(), 1)
    assert metrics["dead_experts"] == 2 and metrics["dead_expert_share"] == 0.25 and metrics["expert_load_max"] == 2


def test_nothing_to_tell():
    """A dense model, and a batch without signal, have no load: null, not zero."""
    dense, empty = Learner(run_file(family="gpt2")), Learner(run_file())
    assert dense.step(groups(), 1)["expert_load_max"] is None
    assert empty.step(groups(rewards=(1,)), 1)["dead_experts"] is None
