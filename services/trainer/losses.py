"""Losses and advantages as plain functions, each with its equation and source.

Axes: G samples of a group, M trained tokens, V vocabulary.

mu is the sampler (behaviour policy): its log-probabilities were recorded token by token while it generated. pi is the model
that is being trained. Both are of the plain softmax: a temperature other than 1 is refused when the run file is read, so no
scaling happens here. One optimizer step is taken per batch, so mu is the only anchor that is needed.
"""

from __future__ import annotations

import numpy as np
import torch

STD_EPS = 1e-6
# exp(20) = 4.9e8 keeps ratios finite in fp32. Beyond it a token has no gradient: an approximation that only ever acts on
# tokens whose probability changed a hundred-million-fold.
MAX_LOG_RATIO = 20.0
NEVER_EMPTY = ("k3", "ratio_max", "clip_share", "ess", "gap_mean", "gap_max")
MAYBE_EMPTY = ("gap_fresh_mean", "gap_fresh_max", "gap_stale_mean", "gap_stale_max")


def grpo_advantages(rewards_G: np.ndarray, normalize_std: bool = True) -> np.ndarray:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6), std with ddof = 1: float64 [G].

    Group-relative advantages, GRPO (arXiv 2402.03300, section 4.1.2); without std: Dr. GRPO (arXiv 2503.20783, section 3.2).
    A group whose rewards are all equal, or that has one sample, gets exactly 0: there is nothing to compare.
    """
    rewards_G = np.asarray(rewards_G, np.float64)
    if len(rewards_G) < 2 or rewards_G.max() == rewards_G.min():
        return np.zeros(len(rewards_G))
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(ddof=1) + STD_EPS) if normalize_std else centred_G


def clipped_policy_loss(
    logprobs_M: torch.Tensor, behaviour_M: torch.Tensor, advantages_M: torch.Tensor, clip_low: float, clip_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """l = max(-A r, -A clip(r, 1 - low, 1 + high)) with r = pi / mu, to be minimised: [M], gradient in `logprobs_M`.

    PPO (arXiv 1707.06347, equation 7) with the asymmetric range of DAPO (arXiv 2503.14476, section 3.1). With `dual_clip` = c,
    tokens with A < 0 get min(l, -c A) (arXiv 1912.09729, equation 5): a bound where PPO has none.
    """
    ratio_M = torch.exp((logprobs_M - behaviour_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    if dual_clip is not None:
        loss_M = torch.where(advantages_M < 0, torch.minimum(loss_M, -dual_clip * advantages_M), loss_M)
    return loss_M


def token_mean(loss_M: torch.Tensor, tokens: int) -> torch.Tensor:
    """sum(l) / N, N = trained tokens of the whole optimizer step (not of this micro-batch), at least 1: scalar.

    DAPO (arXiv 2503.14476, section 3.3). Because N is known before the first backward pass, the gradient is the same for any
    split into micro-batches. Tokens of groups without signal are neither in the sum nor in N.
    """
    return loss_M.sum() / max(tokens, 1)


def log_probabilities(logits_M_V: torch.Tensor, targets_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits)[target] with gradient, and the entropy of each distribution without: two fp32 (or fp64) [M]."""
    if logits_M_V.dtype not in (torch.float32, torch.float64):
        logits_M_V = logits_M_V.float()
    all_M_V = torch.log_softmax(logits_M_V, dim=-1)
    with torch.no_grad():
        entropy_M = torch.special.entr(all_M_V.exp()).sum(dim=-1)
    return all_M_V.gather(1, targets_M.unsqueeze(1)).squeeze(1), entropy_M


def divergence(
    log_ratio_M: np.ndarray, advantages_M: np.ndarray, lags_M: np.ndarray, clip_low: float, clip_high: float,
) -> dict[str, float | None]:
    """How far pi is from mu on the trained tokens. `log_ratio_M` = log pi - log mu at this step's (only) forward pass.

    k3: mean of r - 1 - log r, an unbiased, never negative estimate of KL(mu || pi) (Schulman, "Approximating KL divergence").
    gap_*: mean and largest |log pi - log mu| of all tokens; gap_fresh_* of those at lag 0 in segments of one version, where the
    weights are the same and only the two implementations differ; gap_stale_* of the rest, where the policy has moved, or the
    sampler went on with a cache of older weights (negative lag here); None when there are none.
    clip_share: share of tokens whose gradient the clip removes. ess: effective sample size of the weights r, as a share.
    """
    if not len(log_ratio_M):
        nothing: dict[str, float | None] = dict.fromkeys(NEVER_EMPTY, 0.0)
        return nothing | dict.fromkeys(MAYBE_EMPTY)
    log_ratio_M = log_ratio_M.astype(np.float64)
    ratio_M = np.exp(np.clip(log_ratio_M, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_M = ((advantages_M > 0) & (ratio_M > 1 + clip_high)) | ((advantages_M < 0) & (ratio_M < 1 - clip_low))
    out: dict[str, float | None] = {
        "k3": float((ratio_M - 1 - log_ratio_M).mean()),
        "ratio_max": float(ratio_M.max()),
        "clip_share": float(clipped_M.mean()),
        "ess": float(ratio_M.sum() ** 2 / (len(ratio_M) * (ratio_M**2).sum())),
    }
    for name, chosen_M in (("gap", np.ones(len(lags_M), bool)), ("gap_fresh", lags_M == 0), ("gap_stale", lags_M != 0)):
        gap_M = np.abs(log_ratio_M[chosen_M])
        out[f"{name}_mean"] = float(gap_M.mean()) if len(gap_M) else None
        out[f"{name}_max"] = float(gap_M.max()) if len(gap_M) else None
    return out
