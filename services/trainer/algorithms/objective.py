"""The chosen algorithm put together: from groups to advantages and weights, from log-probabilities to one number.

With several optimizer steps per batch (services.trainer.mini_steps) advantages are of the whole batch, weights of a mini-batch.

    R ─► overlong, KL in the reward ─► advantages ─► (whitening) ─► per token x weight of the aggregation
    pi, p, mu ─► policy loss x w x masks (+ KL) (- entropy) ─► sum

Axes: S samples of an optimizer step, G samples of a group, M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.algorithms import advantages, aggregation, corrections, divergences, policy_losses
from services.trainer.algorithms.policy_losses import Clip, Tokens
from slipstream import config


@dataclass(frozen=True, slots=True)
class SampleTerms:
    """What the objective knows of each sample before the first forward pass: three [S]."""

    rewards: np.ndarray  # float64, after shaping
    advantages: np.ndarray  # float64
    weights: np.ndarray  # float64, of each of its tokens; 0 = not trained and not counted


@dataclass(frozen=True, slots=True)
class Episode:
    """The trained tokens of one sample in the order of its model calls, whatever segments they lie in: [T] each, float64."""

    rewards: np.ndarray
    turns: np.ndarray  # int64, ascending: model call that generated the token
    values: np.ndarray | None = None  # of the critic: what it expects from the token on, before it


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What the objective knows of each token before the first forward pass."""

    advantages: list[np.ndarray]  # float64 [T_i] for each sample
    returns: list[np.ndarray] | None  # float64 [T_i], what the critic learns; None without one
    outcomes: list[np.ndarray] | None  # float64 [T_i], what came, discounted; None without a critic
    weights: np.ndarray  # float64 [S], of each token of the sample; 0 = not trained and not counted


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of a micro-batch, [M] each; `reference` only with a KL term in the loss, `proximal` only when the
    policy before the first of several mini-steps was asked."""

    logprobs: torch.Tensor  # log pi, with gradient
    entropy: torch.Tensor  # with gradient when there is an entropy term
    behaviour: torch.Tensor  # log mu
    advantages: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor  # int64
    lags: torch.Tensor  # int64
    reference: torch.Tensor | None = None
    proximal: torch.Tensor | None = None


class Objective:
    """The algorithm of a run. Stateless."""

    def __init__(self, settings: config.Algorithm, longest: int) -> None:
        """`longest`: most tokens of an answer, rollout.max_new_tokens."""
        self.settings, self.longest = settings, longest
        self._clip = Clip(
            settings.clip_low, settings.clip_high, settings.dual_clip, settings.tau_positive, settings.tau_negative)
        self._policy_loss = policy_losses.LOSSES[settings.policy_loss]

    @property
    def kl_in_reward(self) -> bool:
        """Whether a divergence from the reference model is taken off the rewards."""
        return self.settings.kl != "none" and self.settings.kl_in == "reward"

    @property
    def kl_in_loss(self) -> bool:
        """Whether it is a term of the loss."""
        return self.settings.kl != "none" and self.settings.kl_in == "loss"

    @property
    def moves_without_advantage(self) -> bool:
        """Whether a token whose advantage is 0 can have a gradient."""
        return self.kl_in_loss or self.settings.entropy_coefficient != 0 or self.taught

    def moves(self, advantages_M: np.ndarray) -> bool:
        """Whether a row with these advantages can have a gradient."""
        return self.moves_without_advantage or bool(advantages_M.any())

    @property
    def compares(self) -> bool:
        """Whether a group whose rewards are all equal has nothing to say."""
        return self.settings.advantage not in ("gae", "none") and self.settings.credit == "sample" and not self.taught

    @property
    def taught(self) -> bool:
        """Whether a teacher adds to the advantages afterwards: then every sample counts, whatever its group's rewards."""
        return bool(self.settings.teacher)

    def weights(self, counts_S: np.ndarray) -> np.ndarray:
        """Weight of each token of samples with so many trained tokens, all those of one optimizer step: [S]."""
        return aggregation.WEIGHTS[self.settings.aggregation](counts_S, self.longest)

    def samples(
        self, rewards_S: np.ndarray, groups_S: np.ndarray, tokens_S: np.ndarray, truncated_S: np.ndarray,
        divergence_S: np.ndarray | None = None,
    ) -> SampleTerms:
        """Rewards, advantages and weights of a step's samples. `groups_S` numbers the group of each; `tokens_S` counts trained
        tokens; `truncated_S` says whose answer was cut off; `divergence_S` is the sum of k1 against the reference.

        Groups without signal are left out: of the sum, of every denominator and of the whitening.
        """
        settings = self.settings
        rewards_S = rewards_S.astype(np.float64)
        if settings.overlong_margin:
            rewards_S = rewards_S + [
                advantages.overlong_penalty(int(n), self.longest, settings.overlong_margin) for n in tokens_S]
        if divergence_S is not None:
            rewards_S = rewards_S - settings.kl_coefficient * divergence_S
        advantages_S, counted_S = np.zeros(len(rewards_S)), np.zeros(len(rewards_S), bool)
        for group in np.unique(groups_S):
            at = np.flatnonzero(groups_S == group)
            if not advantages.nothing_to_compare(rewards_S[at]):
                counted_S[at] = True
                advantages_S[at] = advantages.OF_GROUP[settings.advantage](rewards_S[at])
        if self.taught:
            counted_S = tokens_S > 0
        if settings.mask_truncated:
            counted_S &= ~truncated_S
        counts_S = np.where(counted_S, tokens_S, 0)
        if settings.advantage in advantages.WHITENED:
            advantages_S = np.where(counted_S, advantages.whitened(advantages_S, counts_S), 0.0)
        weights_S = self.weights(counts_S)
        return SampleTerms(rewards_S, advantages_S, np.where(counted_S, weights_S, 0.0))

    @property
    def per_token(self) -> bool:
        """Whether a sample's tokens can have different advantages: `tokens` is needed, not `samples`."""
        return self.settings.advantage == "gae" or self.settings.credit != "sample"

    def tokens(self, episodes: Sequence[Episode], groups_S: np.ndarray, truncated_S: np.ndarray) -> TokenTerms:
        """Advantages, returns and weights of a step's tokens. The same rules as `samples`, where both apply.

        With a critic nothing is compared with the group, so every sample counts.
        """
        settings = self.settings
        tokens_S = np.array([len(e.rewards) for e in episodes], np.int64)
        rewards = [self._shaped(e.rewards) for e in episodes]
        if settings.advantage == "gae":
            counted_S, pairs = tokens_S > 0, []
            for episode, rewards_T in zip(episodes, rewards, strict=True):
                assert episode.values is not None
                pairs.append(advantages.gae(rewards_T, episode.values, settings.gamma, settings.gae_lambda))
            found, returns = [a for a, _ in pairs], [r for _, r in pairs]
            outcomes = [advantages.to_go(rewards_T, settings.gamma) for rewards_T in rewards]
        else:
            found, counted_S = self._compared(episodes, rewards, groups_S)
            returns = outcomes = None
        if settings.mask_truncated:
            counted_S &= ~truncated_S
        counts_S = np.where(counted_S, tokens_S, 0)
        if (settings.advantage == "gae" and settings.whiten) or settings.advantage in advantages.WHITENED:
            kept = [i for i in range(len(found)) if counts_S[i]]
            joined = np.concatenate([found[i] for i in kept]) if kept else np.zeros(0)
            parts = np.split(advantages.whitened(joined, np.ones(len(joined))), np.cumsum(counts_S[kept])[:-1])
            for i, part in zip(kept, parts, strict=False):
                found[i] = part
        weights_S = self.weights(counts_S)
        return TokenTerms(found, returns, outcomes, np.where(counted_S, weights_S, 0.0))

    def _shaped(self, rewards_T: np.ndarray) -> np.ndarray:
        """With the penalty for overlong answers on the last token."""
        if not self.settings.overlong_margin or not len(rewards_T):
            return rewards_T
        shaped_T = rewards_T.copy()
        shaped_T[-1] += advantages.overlong_penalty(len(rewards_T), self.longest, self.settings.overlong_margin)
        return shaped_T

    def _compared(
        self, episodes: Sequence[Episode], rewards: Sequence[np.ndarray], groups_S: np.ndarray,
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Advantages within groups, and whose groups had something to compare: [S]."""
        name, counted_S = self.settings.advantage, np.zeros(len(episodes), bool)
        found = [np.zeros(len(rewards_T)) for rewards_T in rewards]
        for group in np.unique(groups_S):
            at: list[int] = np.flatnonzero(groups_S == group).tolist()
            mine, turns = [rewards[i] for i in at], [episodes[i].turns for i in at]
            by_turn, compared = advantages.turn_by_turn(mine, turns, advantages.OF_GROUP[name])
            if name == "reinforce_pp":  # every token answers for what follows it; the baseline is the batch's mean
                by_turn = [advantages.to_go(rewards_T) for rewards_T in mine]
            if self.settings.credit == "token":
                compared |= any(not np.array_equal(mine[0], other) for other in mine[1:])
            counted_S[at] = compared or self.taught
            for i, advantages_T in zip(at, by_turn, strict=True):
                found[i] = advantages_T if compared else found[i]
        return found, counted_S & np.array([len(r) > 0 for r in rewards], bool)

    def loss(self, tokens: LossInputs) -> torch.Tensor:
        """This micro-batch's part of the step's loss: a scalar whose gradients add up over micro-batches."""
        settings, pi_M = self.settings, tokens.logprobs
        anchor_M = self.anchor(tokens)
        loss_M = self._policy_loss(Tokens(pi_M, anchor_M, tokens.advantages, tokens.rows), self._clip)
        loss_M = loss_M * self._correction(tokens, anchor_M)
        if self.kl_in_loss:
            assert tokens.reference is not None
            loss_M = loss_M + settings.kl_coefficient * divergences.ESTIMATES[settings.kl](pi_M, tokens.reference)
        if settings.entropy_coefficient:
            loss_M = loss_M - settings.entropy_coefficient * tokens.entropy
        return (loss_M * tokens.weights).sum()

    def anchor(self, tokens: LossInputs) -> torch.Tensor:
        """log p: [M], no gradient.

        recomputed: the policy before the batch. With one optimizer step per batch that is this very forward pass; with several,
        `proximal`, a pass before the first of them. interpolated: on the line from the sampler to the policy of now, which
        moves with each mini-step, as in AReaL.
        """
        match self.settings.anchor:
            case "recomputed":
                return tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
            case "interpolated":
                return corrections.interpolated_anchor(tokens.logprobs, tokens.behaviour, tokens.lags)
            case _:
                return tokens.behaviour

    def _correction(self, tokens: LossInputs, anchor_M: torch.Tensor) -> torch.Tensor:
        """Weights and masks of p / mu, and of pi / mu, multiplied: [M], no gradient."""
        settings, log_w_M = self.settings, anchor_M - tokens.behaviour
        log_ratio_M = (tokens.logprobs - tokens.behaviour).detach()
        match settings.correction:
            case "truncated":
                factor_M = corrections.truncated(log_w_M, settings.correction_high)
            case "masked":
                factor_M = corrections.masked(log_w_M, settings.correction_low, settings.correction_high)
            case "full":
                factor_M = corrections.importance(log_w_M)
            case _:
                factor_M = torch.ones_like(log_w_M)
        if settings.sequence_low or settings.sequence_high:
            factor_M = factor_M * corrections.sequence_filter(
                log_ratio_M, tokens.rows, settings.sequence_low or 0.0, settings.sequence_high or float("inf"))
        if settings.veto_below:
            factor_M = factor_M * corrections.veto(log_ratio_M, tokens.rows, settings.veto_below)
        if settings.off_policy_delta is not None:
            factor_M = factor_M * corrections.off_policy_mask(
                log_ratio_M, tokens.advantages, tokens.rows, settings.off_policy_delta)
        return factor_M


def group_numbers(sizes: Sequence[int]) -> np.ndarray:
    """Group of each sample from the sizes of the groups: 2, 3 gives 0 0 1 1 1."""
    return np.repeat(np.arange(len(sizes)), sizes)
