"""Corrections for data of an older or another policy: weights and masks from w = p / mu, all without gradient.

Each is [M] from the log of w, or of pi / mu, per token. A weight multiplies the loss; a mask of 0 takes a token out of the
numerator. Denominators are of the step as it was batched and do not shrink (as AReaL does; TRL and slime differ).
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.policy_losses import MAX_LOG_RATIO, row_mean


def importance(log_w_M: torch.Tensor) -> torch.Tensor:
    """w, kept finite: [M]."""
    return torch.exp(log_w_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def truncated(log_w_M: torch.Tensor, high: float) -> torch.Tensor:
    """min(w, C). Truncated importance sampling, TIS (Ionides 2008; verl and slime, C = 2)."""
    return importance(log_w_M).clamp(max=high)


def masked(log_w_M: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """w where low <= w <= high, else 0. Masked importance sampling, per token: MIS, IcePop (0.5 and 5)."""
    w_M = importance(log_w_M)
    return torch.where((w_M >= low) & (w_M <= high), w_M, torch.zeros_like(w_M))


def sequence_filter(log_w_M: torch.Tensor, rows_M: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """1 for rows with low <= exp(mean log w) <= high, else 0: the geometric filter of slime and verl (`seq_mean_k1`)."""
    mean_M = torch.exp(row_mean(log_w_M, rows_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ((mean_M >= low) & (mean_M <= high)).to(log_w_M.dtype)


def veto(log_w_M: torch.Tensor, rows_M: torch.Tensor, least: float) -> torch.Tensor:
    """0 for rows in which any token has w < least, else 1: one impossible token condemns its sequence (verl, 1e-4)."""
    below_M = (importance(log_w_M) < least).to(log_w_M.dtype)
    return (row_mean(below_M, rows_M) == 0).to(log_w_M.dtype)


def off_policy_mask(
    log_ratio_M: torch.Tensor, advantages_M: torch.Tensor, rows_M: torch.Tensor, delta: float,
) -> torch.Tensor:
    """0 where A < 0 and mean over the row of (log mu - log pi) > delta, else 1. OPSM (DeepSeek-V3.2, section 3.1).

    `log_ratio_M` = log pi - log mu.
    """
    drifted_M = row_mean(-log_ratio_M, rows_M) > delta
    return (~(drifted_M & (advantages_M < 0))).to(log_ratio_M.dtype)


def interpolated_anchor(
    logprobs_M: torch.Tensor, behaviour_M: torch.Tensor, lags_M: torch.Tensor,
) -> torch.Tensor:
    """log p ~ log mu + alpha (log pi - log mu), alpha = (lag - 1) / lag, at least 0: [M], no gradient.

    A-3PO (arXiv 2512.06547). With v the step of pi and v_b that of the token's version, alpha = (v - 1 - v_b) / (v - v_b): the
    proximal policy is one step behind pi on the line from the sampler. At lag 0 or 1 the anchor is the sampler itself.
    """
    lag_M = lags_M.clamp(min=1).to(logprobs_M.dtype)
    return (behaviour_M + (lag_M - 1) / lag_M * (logprobs_M - behaviour_M)).detach()
