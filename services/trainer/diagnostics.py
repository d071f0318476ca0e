"""How far the trained model is from the sampler, per step: figures for metrics and alarms.

Axes: M trained tokens.
"""

from __future__ import annotations

import numpy as np

from services.trainer.algorithms.policy_losses import MAX_LOG_RATIO

NEVER_EMPTY = ("k3", "ratio_max", "clip_share", "ess", "gap_mean", "gap_max")
MAYBE_EMPTY = ("gap_fresh_mean", "gap_fresh_max", "gap_stale_mean", "gap_stale_max")


def divergence(
    log_ratio_M: np.ndarray, advantages_M: np.ndarray, fresh_M: np.ndarray, clip_low: float, clip_high: float,
) -> dict[str, float | None]:
    """How far pi is from mu on the trained tokens. `log_ratio_M` = log pi - log mu at this step's (only) forward pass.

    k3: mean of r - 1 - log r, an unbiased, never negative estimate of KL(mu || pi) (Schulman, "Approximating KL divergence").
    gap_*: mean and largest |log pi - log mu| of all tokens; gap_fresh_* of `fresh_M`, lag 0 in segments of one version, where
    the weights are the same and only the two implementations differ; gap_stale_* of the rest, where the policy has moved,
    or the sampler went on with a cache of older weights; None when there are none.
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
    for name, chosen_M in (("gap", np.ones(len(fresh_M), bool)), ("gap_fresh", fresh_M), ("gap_stale", ~fresh_M)):
        gap_M = np.abs(log_ratio_M[chosen_M])
        out[f"{name}_mean"] = float(gap_M.mean()) if len(gap_M) else None
        out[f"{name}_max"] = float(gap_M.max()) if len(gap_M) else None
    return out
