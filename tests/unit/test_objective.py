"""The objective: presets, what is refused, what counts in denominators, and the invariants that every loss shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.objective import LossInputs, Objective
from services.trainer.algorithms.policy_losses import LOSSES
from services.trainer.learner import Learner
from services.trainer.packing import microbatches, trained_rows
from slipstream.config import Algorithm, parse
from slipstream.errors import ConfigError
from slipstream.sample import FINISH_LENGTH
from tests.trainer_samples import groups, run_file


def objective(**settings: Any) -> Objective:
    return Objective(Algorithm(**settings), longest=10)


def terms(made: Objective, rewards: list[float], groups_of: list[int], tokens: list[int], truncated: list[int] = ()):
    return made.samples(
        np.array(rewards), np.array(groups_of), np.array(tokens), np.isin(np.arange(len(rewards)), truncated))


def test_presets_are_starting_points_that_keys_override():
    """async-moe is the default; a preset sets several keys at once; what the run file says wins."""
    assert (Algorithm().dual_clip, Algorithm(preset="grpo").dual_clip) == (3.0, None)
    gspo = Algorithm(preset="gspo-moe", clip_high=5e-4)
    assert (gspo.policy_loss, gspo.clip_low, gspo.clip_high, gspo.aggregation) == ("gspo", 3e-4, 5e-4, "sequence_mean")


@pytest.mark.parametrize(("settings", "words"), [
    (dict(correction="truncated"), "anchor = sampler: the weight is anchor over sampler, which is 1"),
    (dict(anchor="recomputed"), "centred on a policy that never sampled"),
    (dict(policy_loss="gspo"), "set aggregation = sequence_mean"),
    (dict(policy_loss="cispo", dual_clip=2.0), "dual_clip = 2.0 has no meaning"),
    (dict(kl="k3", kl_in="reward"), "only k1 is unbiased there"),
    (dict(kl="k1"), "its gradient is 0 on average"),
    (dict(preset="dapper"), "'gspo-moe' or 'ppo'"),
    (dict(preset="ppo", advantage="grpo"), "preset = ppo with advantage = grpo: the preset is GAE with a critic"),
])
def test_contradictions_are_refused_with_the_reason(settings, words):
    """At the run file, before anything starts."""
    data = run_file().model_dump(mode="json")
    data["algorithm"] = settings
    with pytest.raises(ConfigError) as error:
        parse(data)
    assert words in error.value.message


def test_what_counts_in_the_denominator():
    """A sample with advantage 0 inside a group with signal counts; a group without signal does not, nor does one cut off
    when truncated answers are masked: that is the same as if it had not been in the batch, though its reward compares."""
    found = terms(objective(), [0.0, 0.5, 1.0, 1.0, 1.0], [0, 0, 0, 1, 1], [2, 4, 2, 9, 9])
    assert found.advantages[1] == 0 and found.weights.tolist() == [1 / 8, 1 / 8, 1 / 8, 0, 0]
    masked = terms(objective(mask_truncated=True), [0.0, 0.5, 1.0], [0, 0, 0], [2, 4, 2], truncated=[1])
    assert masked.weights.tolist() == [1 / 4, 0, 1 / 4]
    np.testing.assert_array_equal(masked.advantages, found.advantages[:3])


def test_overlong_answers_lose_reward_before_they_are_compared():
    """With a limit of 10 and a margin of 4: 6 tokens lose nothing, 8 half, 10 one."""
    found = terms(objective(overlong_margin=4), [1.0, 1.0, 1.0], [0, 0, 0], [6, 8, 10])
    assert found.rewards.tolist() == [1.0, 0.5, 0.0] and found.advantages[0] > 0 > found.advantages[2]


def test_whitening_is_over_the_tokens_of_the_whole_step():
    """reinforce_pp: mean 0 and variance 1 over tokens, not over samples or groups."""
    tokens = np.array([1, 5, 3, 7])
    found = terms(objective(advantage="reinforce_pp"), [0.0, 1.0, 2.0, 0.5], [0, 0, 1, 1], tokens.tolist())
    assert found.advantages @ tokens == pytest.approx(0, abs=1e-12)
    assert found.advantages**2 @ tokens / (tokens.sum() - 1) == pytest.approx(1, abs=1e-6)


def inputs(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, **more: Any) -> LossInputs:
    count = len(logprobs)
    return LossInputs(
        logprobs, torch.zeros(count), behaviour, advantages, torch.full((count,), 1 / count, dtype=torch.float64),
        more.get("rows", torch.zeros(count, dtype=torch.long)), more.get("lags", torch.ones(count, dtype=torch.long)),
        more.get("reference"))


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_reinforce(name):
    """At r = 1 the gradient is -A per token, under the loss's own aggregation."""
    settings = dict(aggregation="sequence_mean") if name.startswith("gspo") else {}
    behaviour = torch.tensor([-1.0, -0.3, -2.0], dtype=torch.float64)
    logprobs = behaviour.clone().requires_grad_()
    advantages = torch.full((3,), -0.7, dtype=torch.float64)
    objective(policy_loss=name, **settings).loss(inputs(logprobs, behaviour, advantages)).backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 3, rtol=0, atol=1e-12)


def test_a_recomputed_anchor_with_a_truncated_weight():
    """Decoupled PPO with one update per batch: r = 1, so the gradient is -A min(pi / mu, C)."""
    behaviour = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.log(torch.tensor([0.5, 1.5, 4.0], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    objective(anchor="recomputed", correction="truncated", correction_high=2.0).loss(
        inputs(logprobs, behaviour, advantages)).backward()
    torch.testing.assert_close(logprobs.grad, -advantages * torch.tensor([0.5, 1.5, 2.0]) / 3, rtol=0, atol=1e-12)


def test_an_interpolated_anchor_is_the_sampler_for_fresh_tokens():
    """alpha = (lag - 1) / lag: 0 at lag 0 and 1, where decoupled equals plain PPO; 2 / 3 of the way at lag 3."""
    behaviour = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([-0.9, -0.8, -0.7], dtype=torch.float64, requires_grad=True)
    advantages, lags = torch.ones(3, dtype=torch.float64), torch.tensor([0, 1, 3])
    made = objective(anchor="interpolated", correction="full")
    anchor = made.anchor(inputs(logprobs, behaviour, advantages, lags=lags))
    torch.testing.assert_close(anchor, torch.tensor([-1.0, -1.0, -0.8], dtype=torch.float64), rtol=0, atol=1e-12)
    fresh = inputs(logprobs, behaviour, advantages, lags=torch.zeros(3, dtype=torch.long))
    assert made.loss(fresh).item() == pytest.approx(objective().loss(fresh).item(), abs=1e-12)


def test_rows_are_vetoed_and_filtered_whole():
    """One impossible token, or a geometric mean out of bounds, takes its row out; other rows stay as they were."""
    behaviour = torch.zeros(4, dtype=torch.float64)
    logprobs = torch.tensor([0.0, -12.0, 0.1, 0.1], dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([0, 0, 1, 1])
    for settings in (dict(veto_below=1e-4), dict(sequence_low=0.5)):
        [gradient] = torch.autograd.grad(
            objective(**settings).loss(inputs(logprobs, behaviour, torch.ones(4, dtype=torch.float64), rows=rows)), logprobs)
        assert gradient[:2].abs().max() == 0 and gradient[2:].abs().min() > 0


@pytest.mark.parametrize("algorithm", [
    {}, dict(preset="gspo-moe", clip_low=0.05, clip_high=0.05), dict(aggregation="sequence_constant", advantage="rloo"),
    dict(aggregation="sequence_sum", policy_loss="cispo", dual_clip=None), dict(advantage="reinforce_pp", policy_loss="sapo"),
    dict(anchor="recomputed", correction="masked"), dict(entropy_coefficient=0.01), dict(kl="k2", kl_coefficient=0.1),
], ids=str)
def test_the_gradient_does_not_depend_on_micro_batching(algorithm):
    """Whatever the combination: one, a few or many micro-batches give the same gradient, to 1e-12 in double precision."""
    found = []
    for budget in (10_000, 40, 1):
        trainer = {"max_grad_norm": 1e9, "tokens_per_microbatch": budget}
        made = Learner(run_file(family="gpt2", algorithm={"preset": "grpo", **algorithm}, trainer=trainer))
        made.model.double()
        if algorithm.get("kl"):
            made.start_reference()
            assert made._reference is not None
            made._reference._model.double()
            with torch.no_grad():
                made.model.lm_head.weight.add_(0.01)
        seen = {}
        made.optimizer.register_step_pre_hook(
            lambda *_, made=made, seen=seen: seen.update({n: p.grad.clone() for n, p in made.model.named_parameters()}))
        made.step(groups(6, seed=2, rewards=(0, 0.5, 1, 0.2)), 1)
        found.append(seen)
    for name, value in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)


def test_a_reference_pulls_the_policy_back():
    """With k2 in the loss and rewards that say little, a policy that was pushed away comes closer to where it started."""
    made = Learner(run_file(algorithm={"kl": "k2", "kl_coefficient": 100.0}))
    made.start_reference()
    with torch.no_grad():
        made.model.lm_head.weight.add_(0.05 * torch.randn_like(made.model.lm_head.weight))
    batch = groups(4, seed=3)

    def distance() -> float:
        rows = made._with_reference(trained_rows(batch, 1, made.objective))
        with torch.no_grad():
            moved = [made.forward(microbatches([row], 10_000)[0])[0] - torch.from_numpy(row.reference) for row in rows]
        return sum(float(gap.abs().sum()) for gap in moved)

    before = distance()
    for step in range(1, 4):
        made.step(batch, step)
    assert distance() < 0.9 * before


def test_kl_in_the_reward_reaches_the_advantages():
    """A sample whose tokens are likelier under the sampler than under the reference loses reward."""
    made = objective(kl="k1", kl_in="reward", kl_coefficient=0.5)
    found = made.samples(
        np.array([1.0, 1.0]), np.zeros(2, int), np.array([3, 3]), np.zeros(2, bool), divergence_S=np.array([0.0, 1.0]))
    assert found.rewards.tolist() == [1.0, 0.5] and found.advantages[0] > 0 > found.advantages[1]


def test_truncated_answers_are_known_from_their_finish_reason():
    """mask_truncated leaves out what the token limit cut off, and only that."""
    batch = groups(2, seed=5)
    batch[0].members[0].sample.finish_reason = FINISH_LENGTH
    plain, masked = Learner(run_file()), Learner(run_file(algorithm={"mask_truncated": True}))
    cut = batch[0].members[0].sample.generated_tokens
    assert plain.step(batch, 1)["trained_tokens"] - masked.step(batch, 1)["trained_tokens"] == cut


def test_a_sample_of_average_reward_still_feels_the_other_terms():
    """Its advantage is 0: plain GRPO need not look at it, a KL or entropy term must."""
    batch = groups(2, size=3, seed=5, rewards=(0.0, 0.5, 1.0))
    idle = sum(g.members[1].sample.generated_tokens for g in batch)
    plain = Learner(run_file()).step(batch, 1)["trained_tokens"]
    assert Learner(run_file(algorithm={"entropy_coefficient": 0.1})).step(batch, 1)["trained_tokens"] == plain + idle
