"""The trainer's step against transformers and an independent implementation, in double precision where exactness counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learner import Learner
from services.trainer.packing import Group, microbatches, trained_rows
from slipstream.errors import InvalidInput
from tests.trainer_samples import FAMILIES, OBJECTIVE, groups, run_file


def learner(family: str = "qwen3_moe", **trainer: Any) -> Learner:
    return Learner(run_file(family=family, trainer={"learning_rate": 1e-3, **trainer}))


def exact(**trainer: Any) -> Learner:
    """In double precision, with gradients as they come."""
    made = learner("gpt2", max_grad_norm=1e9, **trainer)
    made.model.double()
    return made


def gradients(made: Learner, batch: Sequence[Group]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What the optimizer would be given, before clipping."""
    seen = {}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None})

    handle = made.optimizer.register_step_pre_hook(look)
    metrics = made.step(batch, 1)
    handle.remove()
    return seen, metrics


def independent_loss(made: Learner, batch: Sequence[Group]) -> torch.Tensor:
    """GRPO token by token from its definition: one plain transformers forward per sample, no packing, no shared code."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group in batch:
        rewards = [m.reward for m in group.members]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        if std == 0:
            continue
        for member in group.members:
            # The step hands advantages over in fp32, as it does the sampler's log-probabilities.
            advantage = float(np.float32((member.reward - mean) / (std + 1e-6)))
            [s] = member.sample.segments
            ids = torch.from_numpy(s.tokens).long()
            logprobs = torch.log_softmax(made.model(input_ids=ids[None], use_cache=False).logits[0], -1)
            for old, t in zip(s.logprobs.tolist(), np.flatnonzero(s.loss_mask).tolist(), strict=True):
                ratio = torch.exp(logprobs[t - 1, ids[t]] - old)
                total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                tokens += 1
    return total / tokens


@pytest.mark.parametrize(("family", "tolerance"), [("gpt2", 1e-13), *((family, 2e-6) for family in FAMILIES)])
def test_loss_and_gradient_equal_an_independent_implementation(family, tolerance):
    """Value and every parameter's gradient: to 1e-13 in double precision, and for each family of experts in fp32."""
    made = exact() if family == "gpt2" else learner(family, max_grad_norm=1e9)
    batch = [*groups(5, seed=1), Group(99, groups(1, rewards=(0.5,))[0].members)]
    loss = independent_loss(made, batch)
    loss.backward()
    expected = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
    made.optimizer.zero_grad()
    found, metrics = gradients(made, batch)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=tolerance)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance * max(1, float(value.abs().max())))


def test_gradient_is_the_same_for_any_micro_batching():
    """The denominator is the step's, so cutting into 1, a few or many micro-batches changes nothing: 1e-12 in fp64."""
    reference, _ = gradients(exact(), groups(6, seed=2))
    for budget in (1, 24, 60):
        found, metrics = gradients(exact(tokens_per_microbatch=budget), groups(6, seed=2))
        assert metrics["microbatches"] > 1
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_a_group_without_signal_contributes_exactly_nothing():
    """Bit for bit the same weights with and without it: not in the sum, not in the denominator."""
    with_it, without = learner(), learner()
    idle = Group(50, groups(1, seed=9, rewards=(1.0,))[0].members)
    assert with_it.step([*groups(seed=4), idle], 1)["groups_without_signal"] == 1
    without.step(groups(seed=4), 1)
    for a, b in zip(with_it.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_without_any_signal_changes_nothing():
    """Not even through the optimizer's moments: a step that has nothing to say is skipped."""
    made = learner()
    made.step(groups(seed=4), 1)
    before = [p.clone() for p in made.model.parameters()]
    metrics = made.step(groups(rewards=(1.0,)), 2)
    assert metrics["loss"] == metrics["grad_norm"] == metrics["trained_tokens"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


def test_padding_and_context_never_reach_the_loss():
    """Whatever ids stand in the padding, log-probabilities are bitwise the same (dense experts, whose rows do not see each
    other)."""
    made = Learner(run_file(schedule={"deterministic": True}))
    rows = trained_rows(groups(seed=6), 1, OBJECTIVE)
    [batch] = microbatches(rows, 10_000)
    padding = np.ones(batch.inputs.shape, bool)
    for i, row in enumerate(sorted(rows, key=lambda r: -len(r.inputs))):
        padding[i, : len(row.inputs)] = False
    assert padding.any()
    found = []
    for poison in (0, 5, 12):
        poisoned = dataclasses.replace(batch, inputs=np.where(padding, poison, batch.inputs))
        logprobs, _ = made.forward(poisoned)
        found.append(logprobs.detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert len(found[0]) == sum(len(row.targets) for row in rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_equal_transformers(family):
    """Packed, padded and selected, they are those of a plain forward of each sequence alone: 1e-5 in fp32."""
    made = learner(family)
    rows = trained_rows(groups(seed=7), 1, OBJECTIVE)
    for batch in microbatches(rows, 60):
        logprobs, entropy = made.forward(batch)
        width = batch.inputs.shape[1]
        for m, place in enumerate(batch.index):
            prefix = torch.from_numpy(batch.inputs[place // width, : place % width + 1])[None]
            with torch.no_grad():
                plain = torch.log_softmax(made.model(input_ids=prefix).logits[0, -1], -1)
            assert logprobs[m].item() == pytest.approx(plain[batch.targets[m]].item(), abs=1e-5)
            assert entropy[m].item() == pytest.approx(-(plain.exp() * plain).sum().item(), abs=1e-5)


def test_one_step_raises_what_was_rewarded():
    """The sign is right: after a step, rewarded answers are more likely and the others less."""
    made = learner(learning_rate=1e-2)
    batch = groups(2, 2, rewards=(0, 1))
    rows = trained_rows(batch, 1, OBJECTIVE)

    def totals() -> list[float]:
        [micro] = microbatches(rows, 10_000)
        logprobs, _ = made.forward(micro)
        signs = np.sign(micro.advantages)
        return [float(logprobs.detach().numpy()[signs == s].sum()) for s in (1, -1)]

    good, bad = totals()
    made.step(batch, 1)
    better, worse = totals()
    assert better > good and worse < bad


@pytest.mark.parametrize("family", FAMILIES)
def test_five_steps_run_in_every_family(family):
    """Finite metrics, growing fit to the rewarded answers, weights that change every time."""
    made, losses = learner(family), []
    before = made.weights()
    for step in range(1, 6):
        metrics = made.step(groups(seed=11, step=step - 1), step)
        assert all(math.isfinite(v) for v in metrics.values() if isinstance(v, float))
        assert metrics["lag_max"] == 0
        losses.append(metrics["loss"])
        after = made.weights()
        assert any(bytes(a.data) != bytes(b.data) for a, b in zip(before, after, strict=True))
        before = after
    assert losses[-1] < losses[0]


def test_unknown_tokens_are_refused():
    """An id outside of the vocabulary is an error with a name, not an index error of torch."""
    batch = groups()
    batch[0].members[0].sample.segments[0].tokens[0] = 9999
    with pytest.raises(InvalidInput, match="outside of the model's"):
        learner().step(batch, 1)
