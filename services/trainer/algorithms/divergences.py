"""Estimates of KL(pi || ref) on sampled tokens: [M], d = log pi - log ref.

k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence"). As *values* k1 and k3 are unbiased. As
*losses* on samples of pi only k2 has the gradient of the reverse KL; that of k1 is 0 on average, that of k3 is the forward
KL's. `k3+` has the value of k3 and the gradient of k2 (verl).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from services.trainer.algorithms.policy_losses import MAX_LOG_RATIO


def k1(logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """d."""
    return logprobs_M - reference_M


def k2(logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """d^2 / 2."""
    return 0.5 * (logprobs_M - reference_M) ** 2


def k3(logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d, never negative."""
    minus_d_M = (reference_M - logprobs_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(minus_d_M) - minus_d_M - 1


def k3_straight_through(logprobs_M: torch.Tensor, reference_M: torch.Tensor) -> torch.Tensor:
    """The value of k3, the gradient of k2."""
    gradient_M = k2(logprobs_M, reference_M)
    return gradient_M - gradient_M.detach() + k3(logprobs_M, reference_M).detach()


# Name in the run file -> the estimate.
ESTIMATES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1, "k2": k2, "k3": k3, "k3+": k3_straight_through}
