"""Policy losses, per token, to be minimised: [M], gradient in `logprobs_M`.

r = pi / p, ratio to the anchor `anchor_M`; A = `advantages_M`. `rows_M` names the row (segment) of each token, for losses that
look at whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# exp(20) = 4.9e8 keeps ratios finite in fp32. Beyond it a token has no gradient: an approximation that only ever acts on
# tokens whose probability changed a hundred-million-fold.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Clip:
    """The numbers that shape a policy loss; see the run file's [algorithm]."""

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a micro-batch."""

    logprobs_M: torch.Tensor  # log pi, with gradient
    anchor_M: torch.Tensor  # log p
    advantages_M: torch.Tensor
    rows_M: torch.Tensor  # int64: row of each token


def ratio(tokens: Tokens) -> torch.Tensor:
    """r = pi / p, kept finite: [M]."""
    return torch.exp((tokens.logprobs_M - tokens.anchor_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def row_mean(values_M: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
    """The mean over each token's row, at every token: [M]."""
    rows = int(rows_M.max()) + 1 if len(rows_M) else 0
    zeros_R = torch.zeros(rows, dtype=values_M.dtype, device=values_M.device)
    counts_R = zeros_R.index_add(0, rows_M, torch.ones_like(values_M))
    return (zeros_R.index_add(0, rows_M, values_M) / counts_R)[rows_M]


def ppo(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """l = max(-A r, -A clip(r, 1 - low, 1 + high)).

    PPO (arXiv 1707.06347, equation 7) with the asymmetric range of DAPO (arXiv 2503.14476, section 3.1). With a dual clip c,
    tokens with A < 0 get min(l, -c A) (arXiv 1912.09729, equation 5): a bound where PPO has none.
    """
    return _clipped(ratio(tokens), tokens.advantages_M, clip)


def gspo(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """PPO's loss with s = exp(mean over the row of log r) in place of r. GSPO (arXiv 2507.18071, equations 5 to 7).

    To be aggregated as a mean over rows; the gradient flows through every token of the row.
    """
    log_s_M = row_mean(tokens.logprobs_M - tokens.anchor_M, tokens.rows_M)
    return _clipped(torch.exp(log_s_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), tokens.advantages_M, clip)


def gspo_token(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """PPO's loss with sg[s] pi / sg[pi] in place of r. GSPO-token (arXiv 2507.18071, equations 13 and 14).

    Equal to `gspo`, value and gradient, when A is the same in the whole row and rows are averaged token-mean, then mean.
    """
    log_s_M = row_mean((tokens.logprobs_M - tokens.anchor_M).detach(), tokens.rows_M)
    own_M = tokens.logprobs_M - tokens.logprobs_M.detach()
    return _clipped(torch.exp((log_s_M + own_M).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), tokens.advantages_M, clip)


def cispo(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """l = -sg[clip(r, 1 - low, 1 + high)] A log pi: no token ever loses its gradient. CISPO (arXiv 2506.13585, equation 4).

    `high` is a distance from 1 here (TRL's epsilon_high for this loss is the cap itself).
    """
    weight_M = ratio(tokens).clamp(1 - clip.low, 1 + clip.high).detach()
    return -weight_M * tokens.advantages_M * tokens.logprobs_M


def sapo(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """l = -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: a soft gate. SAPO (arXiv 2511.20347, equation 6)."""
    tau_M = torch.where(
        tokens.advantages_M > 0, torch.full_like(tokens.advantages_M, clip.tau_positive),
        torch.full_like(tokens.advantages_M, clip.tau_negative))
    return -tokens.advantages_M * torch.sigmoid(tau_M * (ratio(tokens) - 1)) * 4 / tau_M


def dppo_tv(tokens: Tokens, clip: Clip) -> torch.Tensor:
    """l = -m A r, m = [A > 0 ? pi - p <= high : pi - p >= -low], a difference of probabilities. DPPO-TV (arXiv 2602.04879).

    m has no gradient. Meant for p = mu, and for low = high = 0.2.
    """
    moved_M = (torch.exp(tokens.logprobs_M) - torch.exp(tokens.anchor_M)).detach()
    inside_M = torch.where(tokens.advantages_M > 0, moved_M <= clip.high, moved_M >= -clip.low)
    return -tokens.advantages_M * ratio(tokens) * inside_M


# Name in the run file -> the loss.
LOSSES: Mapping[str, Callable[[Tokens, Clip], torch.Tensor]] = {
    "ppo": ppo, "gspo": gspo, "gspo_token": gspo_token, "cispo": cispo, "sapo": sapo, "dppo_tv": dppo_tv}


def _clipped(ratio_M: torch.Tensor, advantages_M: torch.Tensor, clip: Clip) -> torch.Tensor:
    clipped_M = ratio_M.clamp(1 - clip.low, 1 + clip.high)
    loss_M = torch.maximum(-advantages_M * ratio_M, -advantages_M * clipped_M)
    if clip.dual is not None:
        loss_M = torch.where(advantages_M < 0, torch.minimum(loss_M, -clip.dual * advantages_M), loss_M)
    return loss_M


def value_loss(
    values_M: torch.Tensor, returns_M: torch.Tensor, former_M: torch.Tensor, clip: float,
) -> torch.Tensor:
    """1/2 max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2): [M]. PPO's critic, as in OpenAI's baselines."""
    clipped_M = torch.clamp(values_M, former_M - clip, former_M + clip)
    return 0.5 * torch.maximum((values_M - returns_M) ** 2, (clipped_M - returns_M) ** 2)
