"""Advantages and the clipped loss: golden numbers worked out by hand, and the properties that name each formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.trainer.algorithms import aggregation
from services.trainer.algorithms.advantages import dr_grpo, grpo
from services.trainer.algorithms.policy_losses import Clip, Tokens, ppo
from services.trainer.diagnostics import divergence
from services.trainer.logprobs import log_probabilities


def clipped(logprobs, behaviour, advantages, dual=None):
    return ppo(Tokens(logprobs, behaviour, advantages, torch.zeros(len(logprobs), dtype=torch.long)), Clip(0.2, 0.28, dual))


def test_advantages_by_hand():
    """Rewards 1 0 0 1: mean 1/2, unbiased std sqrt(1/3)."""
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(grpo(np.array([1, 0, 0, 1])), [expected, -expected, -expected, expected], rtol=1e-15)
    np.testing.assert_allclose(dr_grpo(np.array([1, 0, 0, 1])), [0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 8, [1e300, 1e300]])
def test_nothing_to_compare_is_exactly_zero(rewards):
    """One sample, or equal rewards that fp arithmetic would not centre to 0 (0.1 * 8), give exactly 0, never NaN."""
    assert (grpo(np.array(rewards)) == 0).all()


def test_advantages_do_not_see_shift_scale_or_order():
    """They add up to 0; R + c and 3 R give the same; permuting the group permutes them."""
    rewards = np.random.default_rng(0).normal(size=8)
    advantages = grpo(rewards)
    assert abs(advantages.sum()) < 1e-12
    np.testing.assert_allclose(grpo(rewards + 5), advantages, rtol=1e-12)
    np.testing.assert_allclose(grpo(3 * rewards), advantages, rtol=1e-5)
    np.testing.assert_array_equal(grpo(rewards[::-1].copy())[::-1], advantages)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), [
    (1.0, 2.0, -2.0, -2.0),  # on policy: the REINFORCE gradient -A
    (1.2, 1.0, -1.2, -1.2),  # inside the clip
    (1.5, 1.0, -1.28, 0.0),  # above it, with A > 0: no more to gain
    (0.5, 1.0, -0.5, -0.5),  # below it, with A > 0: pulled back
    (0.5, -1.0, 0.8, 0.0),  # below it, with A < 0: no more to gain
    (1.5, -1.0, 1.5, 1.5),  # above it, with A < 0: pushed back, without a bound
    (5.0, -1.0, 5.0, 5.0),
])
def test_clipped_loss_by_hand(ratio, advantage, loss, gradient):
    """Loss and d loss / d log pi of one token with clip 0.2 / 0.28. d r / d log pi = r."""
    behaviour = torch.tensor([-1.3], dtype=torch.float64)
    logprob = (behaviour + math.log(ratio)).requires_grad_()
    out = clipped(logprob, behaviour, torch.tensor([advantage], dtype=torch.float64))
    out.sum().backward()
    assert out.item() == pytest.approx(loss, abs=1e-12)
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_dual_clip_bounds_what_ppo_leaves_open():
    """With c = 3 a token with A < 0 and ratio 5 costs 3 |A| and has no gradient; others are untouched."""
    behaviour = torch.zeros(3, dtype=torch.float64)
    logprobs = torch.log(torch.tensor([5.0, 2.0, 5.0], dtype=torch.float64)).requires_grad_()
    out = clipped(logprobs, behaviour, torch.tensor([-1.0, -1.0, 1.0], dtype=torch.float64), 3.0)
    out.sum().backward()
    np.testing.assert_allclose(out.detach(), [3, 2, -1.28])
    np.testing.assert_allclose(logprobs.grad, [0, 2, 0], atol=1e-15)


def test_extreme_ratios_stay_finite():
    """log ratios of +-200 give finite losses and gradients in fp32."""
    logprobs = torch.tensor([0.0, -200.0, 0.0, -200.0], requires_grad=True)
    behaviour, advantages = torch.tensor([-200.0, 0.0, -200.0, 0.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    out = clipped(logprobs, behaviour, advantages)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(logprobs.grad).all()


def test_token_mean_is_over_the_whole_step():
    """The denominator is given, not counted, and never below 1."""
    assert aggregation.token_mean(np.array([8, 4]), 0).tolist() == [1 / 12, 1 / 12]
    assert aggregation.token_mean(np.zeros(0, int), 0).tolist() == []


def test_log_probabilities_and_entropy_by_hand():
    """Two tokens with probabilities 1/4 and 3/4; a token of probability 0 adds 0 to the entropy, not NaN."""
    logits = torch.tensor([[0.0, math.log(3), -math.inf]], dtype=torch.float64)
    logprob, entropy = log_probabilities(logits, torch.tensor([1]))
    assert logprob.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-15)


def test_divergence_by_hand():
    """Fresh tokens and stale ones are told apart; k3 is 0 only where nothing moved."""
    found = divergence(np.log([1.0, 1.1, 0.5]), np.array([1.0, -1.0, -1.0]), np.array([True, True, False]), 0.2, 0.28)
    assert found["k3"] == pytest.approx((0 + (0.1 - math.log(1.1)) + (-0.5 - math.log(0.5))) / 3)
    assert found["ratio_max"] == pytest.approx(1.1)
    assert found["clip_share"] == pytest.approx(1 / 3)
    assert found["ess"] == pytest.approx(2.6**2 / (3 * (1 + 1.21 + 0.25)))
    assert found["gap_fresh_max"] == pytest.approx(math.log(1.1))
    assert found["gap_stale_mean"] == found["gap_stale_max"] == found["gap_max"] == pytest.approx(math.log(2))
    assert divergence(np.zeros(0), np.zeros(0), np.zeros(0, bool), 0.2, 0.28)["gap_fresh_mean"] is None


def test_k3_estimates_the_divergence():
    """Its expectation over mu, by enumeration of 5 tokens, is KL(mu || pi)."""
    random = np.random.default_rng(1)
    mu, pi = random.dirichlet(np.ones(5)), random.dirichlet(np.ones(5))
    expectation = sum(m * divergence(
        np.array([math.log(p / m)]), np.ones(1), np.ones(1, bool), 0.2, 0.28)["k3"] for m, p in zip(mu, pi, strict=True))
    assert expectation == pytest.approx(float((mu * np.log(mu / pi)).sum()), abs=1e-12)
