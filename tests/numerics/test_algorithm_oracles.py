"""Our algorithms against TRL's and verl's own functions, values and gradients, in double precision.

Ours see the trained tokens of all rows joined, [M]; theirs see padded matrices with a mask, [B, T].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import advantages, aggregation, corrections, divergences
from services.trainer.algorithms.policy_losses import LOSSES, Clip, Tokens, value_loss
from tests.oracles import Config, trl_loss, verl

B, T = 12, 9
AGGREGATIONS = {
    "token_mean": "token-mean", "sequence_sum": "seq-mean-token-sum", "sequence_mean": "seq-mean-token-mean",
    "sequence_constant": "seq-mean-token-sum-norm"}


class Batch:
    """Random rows of 1 to T tokens, as matrices and joined."""

    def __init__(self, seed: int = 0, spread: float = 0.6) -> None:
        make = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(1, T + 1, (B,), generator=make)
        self.mask = (torch.arange(T)[None] < self.lengths[:, None]).double()
        self.old = -torch.rand(B, T, generator=make, dtype=torch.float64) * 4 - 0.05
        self.logprobs = (self.old + spread * torch.randn(B, T, generator=make, dtype=torch.float64)).clamp(max=-1e-3)
        self.logprobs.requires_grad_()
        self.advantages_B = torch.randn(B, generator=make, dtype=torch.float64)
        self.advantages = self.advantages_B[:, None].expand(B, T).contiguous()
        self.rows_M = torch.nonzero(self.mask)[:, 0]

    def joined(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.mask.bool()]

    def tokens(self) -> Tokens:
        return Tokens(self.joined(self.logprobs), self.joined(self.old), self.joined(self.advantages), self.rows_M)

    def weights(self, name: str, longest: int = T) -> torch.Tensor:
        return torch.from_numpy(aggregation.WEIGHTS[name](self.lengths.numpy(), longest))[self.rows_M]

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        [gradient] = torch.autograd.grad(loss, self.logprobs)
        return gradient


def same(batch: Batch, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-12) -> None:
    """Value and gradient in the log-probabilities."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    torch.testing.assert_close(batch.gradient(ours), batch.gradient(theirs), rtol=0, atol=tolerance)


def verl_config(clip: Clip) -> Config:
    return Config(
        clip_ratio=0.2, clip_ratio_low=clip.low, clip_ratio_high=clip.high, clip_ratio_c=clip.dual or 1e9,
        tau_pos=clip.tau_positive, tau_neg=clip.tau_negative, global_batch_info={})


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
@pytest.mark.parametrize(("ours", "theirs", "clip"), [
    ("ppo", "vanilla", Clip(0.2, 0.28)), ("ppo", "vanilla", Clip(0.2, 0.28, 3.0)), ("ppo", "vanilla", Clip(0.2, 0.28, 1.1)),
    ("gspo_token", "gspo", Clip(0.05, 0.08)), ("cispo", "cispo", Clip(0.2, 0.28)), ("sapo", "sapo", Clip()),
])
def test_policy_losses_equal_verls(ours, theirs, clip, aggregate):
    """Every loss under every aggregation; verl's SAPO knows one. seq-mean-token-mean is divided by |o| + 1e-8, hence 1e-7."""
    if ours == "sapo":
        aggregate = "sequence_mean"
    batch = Batch(1)
    loss = (LOSSES[ours](batch.tokens(), clip) * batch.weights(aggregate)).sum()
    function: Callable[..., Any] = getattr(verl(), f"compute_policy_loss_{theirs}")
    reference, _ = function(batch.old, batch.logprobs, batch.advantages, batch.mask, AGGREGATIONS[aggregate], verl_config(clip))
    same(batch, loss, reference, 1e-7 if aggregate == "sequence_mean" else 1e-12)


def test_gspo_equals_gspo_token():
    """The form whose gradient flows through s, when A is constant in a row and rows are averaged token-mean, then mean."""
    batch = Batch(2, spread=0.2)
    clip, weights = Clip(0.05, 0.08), batch.weights("sequence_mean")
    of_rows, of_tokens = (LOSSES[name](batch.tokens(), clip) for name in ("gspo", "gspo_token"))
    same(batch, (of_rows * weights).sum(), (of_tokens * weights).sum())


@pytest.mark.parametrize(("ours", "settings", "aggregate", "clip"), [
    ("ppo", dict(loss_type="dapo"), "token_mean", Clip(0.2, 0.28)),
    ("ppo", dict(loss_type="grpo"), "sequence_mean", Clip(0.2, 0.28)),
    ("ppo", dict(loss_type="dr_grpo", max_completion_length=100), "sequence_constant", Clip(0.2, 0.28)),
    ("gspo", dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08), "sequence_mean",
     Clip(0.05, 0.08)),
    ("sapo", dict(loss_type="sapo"), "sequence_mean", Clip()),
    ("cispo", dict(loss_type="cispo", epsilon_high=1.28), "token_mean", Clip(1.0, 0.28)),
])
def test_policy_losses_equal_trls(ours, settings, aggregate, clip):
    """GRPOTrainer's own loss on the same log-probabilities. Its CISPO has no lower clip, and names the cap itself."""
    batch = Batch(3)
    loss = (LOSSES[ours](batch.tokens(), clip) * batch.weights(aggregate, 100)).sum()
    tolerance = 1e-7 if ours == "sapo" else 1e-12  # it holds the temperatures in fp32
    same(batch, loss, trl_loss(batch.logprobs, batch.old, batch.advantages_B, batch.mask, **settings), tolerance)


def test_dppo_masks_where_verl_masks():
    """The mask is verl's; the loss differs by design: -m A r with gradient through r, where verl has -m A sg[r] log pi."""
    batch, clip = Batch(4, spread=1.5), Clip(0.15, 0.2)
    loss = (LOSSES["dppo_tv"](batch.tokens(), clip) * batch.weights("token_mean")).sum()
    reference, metrics = verl().compute_policy_loss_dppo_tv(
        batch.old, batch.logprobs, batch.advantages, batch.mask, "token-mean",
        Config(clip_ratio=0.2, clip_ratio_low=0.15, clip_ratio_high=0.2, clip_ratio_c=1e9, global_batch_info={}))
    assert metrics["actor/pg_clipfrac"] > 0.05
    torch.testing.assert_close(batch.gradient(loss), batch.gradient(reference), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("k2", "k2"), ("k3", "low_var_kl"), ("k3+", "k3+")])
def test_divergences_equal_verls(ours, theirs):
    """Values and gradients of each estimate."""
    batch = Batch(5)
    loss = (divergences.ESTIMATES[ours](batch.joined(batch.logprobs), batch.joined(batch.old))).sum()
    same(batch, loss, (verl().kl_penalty(batch.logprobs, batch.old, theirs) * batch.mask).sum())


def test_kl_in_the_loss_equals_trls():
    """beta k3 beside the policy loss."""
    batch = Batch(6)
    weights = batch.weights("token_mean")
    reference = batch.old + 0.1
    kl = divergences.k3(batch.joined(batch.logprobs), batch.joined(reference))
    loss = ((LOSSES["ppo"](batch.tokens(), Clip(0.2, 0.28)) + 0.04 * kl) * weights).sum()
    same(batch, loss, trl_loss(
        batch.logprobs, batch.old, batch.advantages_B, batch.mask, loss_type="dapo", reference=reference, beta=0.04))


GROUPS = np.repeat(np.arange(3), 4)


@pytest.mark.parametrize(("ours", "theirs", "arguments"), [
    ("grpo", "grpo", dict(epsilon=1e-6, norm_adv_by_std_in_grpo=True)),
    ("dr_grpo", "grpo", dict(norm_adv_by_std_in_grpo=False)),
    ("rloo", "rloo", {}),
    ("reinforce_pp_baseline", "reinforce_plus_plus_baseline", {}),
    ("reinforce_pp", "reinforce_plus_plus", dict(config=Config(gamma=1.0))),
])
def test_advantages_equal_verls(ours, theirs, arguments):
    """Three groups of four; the whitened ones count tokens. The reward lies on the last token."""
    batch = Batch(7)
    rewards = np.random.default_rng(3).normal(size=B)
    token_rewards = torch.zeros(B, T, dtype=torch.float64)
    token_rewards[torch.arange(B), batch.lengths - 1] = torch.from_numpy(rewards)
    function = getattr(verl(), f"compute_{theirs}_outcome_advantage")
    if "index" in function.__code__.co_varnames:
        arguments = arguments | {"index": GROUPS}
    reference, _ = function(token_rewards.clone(), batch.mask, **arguments)
    mine = np.concatenate([advantages.OF_GROUP[ours](rewards[g == GROUPS]) for g in range(3)])
    if ours in advantages.WHITENED:
        mine = advantages.whitened(mine, batch.lengths.numpy())
    torch.testing.assert_close(torch.from_numpy(mine)[:, None] * batch.mask, reference * batch.mask, rtol=0, atol=2e-9)


def test_gae_equals_verls_with_tool_tokens_between():
    """Rewards on several tokens, a gap in the mask: what a tool wrote neither has a value nor decays anything."""
    batch = Batch(8)
    batch.mask[0, 2:5] = 0
    make = np.random.default_rng(1)
    rewards, values = make.normal(size=(B, T)), make.normal(size=(B, T))
    masked = torch.from_numpy(rewards) * batch.mask
    _, reference = verl().compute_gae_advantage_return(masked, torch.from_numpy(values), batch.mask, 0.97, 0.9)
    for i in range(B):
        at = batch.mask[i].bool().numpy()
        _, returns = advantages.gae(rewards[i][at], values[i][at], 0.97, 0.9)
        np.testing.assert_allclose(returns, reference[i].numpy()[at], atol=1e-12)


def test_the_critics_loss_equals_verls():
    """With the clip around the former values."""
    batch = Batch(9)
    returns = batch.old + 0.7
    loss = (value_loss(batch.joined(batch.logprobs), batch.joined(returns), batch.joined(batch.old), 0.3)
            * batch.weights("token_mean")).sum()
    reference, _ = verl().compute_value_loss(batch.logprobs, returns, batch.old, batch.mask, 0.3)
    same(batch, loss, reference)


def test_importance_weights_equal_verls():
    """TIS, and the token mask of IcePop, against verl's rollout correction, whose bounds are of 1 / w."""
    batch = Batch(10, spread=1.0)
    log_w = (batch.logprobs - batch.old).detach()
    weights, _ = verl().correction.compute_rollout_correction_weights(log_w, batch.mask, "token", 2.0)
    torch.testing.assert_close(corrections.truncated(batch.joined(log_w), 2.0), batch.joined(weights), rtol=0, atol=1e-12)
    mask, _ = verl().correction.compute_rollout_rejection_mask(log_w, batch.mask, "token_k1", "0.5_1.5")
    ours = corrections.masked(batch.joined(log_w), 1 / 1.5, 2.0) != 0
    assert 0 < ours.sum() < len(ours)
    torch.testing.assert_close(ours.double(), batch.joined(mask).double())


def test_the_sequence_filter_equals_verls():
    """Mean log w of each row within bounds; verl's bounds are of 1 / w."""
    batch = Batch(11, spread=1.0)
    log_w = (batch.logprobs - batch.old).detach()
    mask, _ = verl().correction.compute_rollout_rejection_mask(log_w, batch.mask, "seq_mean_k1", "0.8_1.2")
    ours = corrections.sequence_filter(batch.joined(log_w), batch.rows_M, 1 / 1.2, 1 / 0.8)
    assert 0 < ours.sum() < len(ours)
    torch.testing.assert_close(ours, batch.joined(mask))


def test_the_off_policy_mask_equals_trls():
    """Rows with A < 0 that drifted from the sampler by more than delta."""
    batch = Batch(12, spread=1.0)
    clip, weights = Clip(0.2, 0.28), batch.weights("token_mean")
    log_ratio = (batch.joined(batch.logprobs) - batch.joined(batch.old)).detach()
    keep = corrections.off_policy_mask(log_ratio, batch.joined(batch.advantages), batch.rows_M, 0.1)
    assert 0 < keep.sum() < len(keep)
    loss = (LOSSES["ppo"](batch.tokens(), clip) * keep * weights).sum()
    same(batch, loss, trl_loss(
        batch.logprobs, batch.old, batch.advantages_B, batch.mask, loss_type="dapo", off_policy_mask_threshold=0.1))
