"""Figures of a batch: what it was like before anything was trained on it, and what its optimizer steps showed.

Axes: M trained tokens of a mini-step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from services.trainer import diagnostics
from services.trainer.algorithms.objective import LossInputs
from services.trainer.packing import Group, Microbatch, Row, lag_histogram, without_signal
from services.trainer.ranks import Alone
from slipstream import config

Metrics = dict[str, Any]
LOG_RATIO, LOG_MOVE, ADVANTAGES, FRESH, ENTROPY = range(5)  # log pi - log mu; log pi - log p, which the clip acts on


def batch_metrics(groups: Sequence[Group], step: int, compares: bool = True) -> Metrics:
    """What a batch is like, before anything is trained on it. `compares`: equal rewards in a group are no signal."""
    samples = [m for g in groups for m in g.members]
    rewards = [m.reward for m in samples]
    lags = lag_histogram(groups, step)
    generated, silent = sum(lags.values()), without_signal(groups) if compares else 0
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "groups": len(groups), "samples": len(samples), "groups_without_signal": silent,
        "without_signal_share": silent / len(groups) if groups and compares else None,
        "tokens": sum(m.sample.tokens for m in samples), "generated_tokens": generated,
        "lag_mean": sum(lag * n for lag, n in lags.items()) / max(generated, 1), "lag_max": max(lags, default=0),
        "lags": {str(lag): lags[lag] for lag in sorted(lags)},
    }


@dataclass(slots=True)
class MiniStep:
    """What one optimizer step showed, gathered micro-batch by micro-batch."""

    loss: float = 0.0
    grad_norm: float = 0.0
    microbatches: int = 0
    load: list[torch.Tensor] = field(default_factory=list)  # tokens by layer and expert
    balance: dict[str, float] = field(default_factory=dict)
    parts: list[tuple[np.ndarray, ...]] = field(default_factory=list)

    def saw(self, batch: Microbatch, inputs: LossInputs, anchor_M: torch.Tensor, loss: float) -> None:
        """A forward pass of a micro-batch, and its part of the loss."""
        pi_M = inputs.logprobs.detach()
        self.loss += loss
        self.microbatches += 1
        self.parts.append(tuple(
            values if isinstance(values, np.ndarray) else values.detach().cpu().numpy() for values in (
                pi_M - inputs.behaviour, pi_M - anchor_M, batch.advantages, batch.fresh, inputs.entropy)))

    def of_all(self, ranks: Alone) -> None:
        """Together with what other ranks saw: loss and micro-batches everywhere, the rest on rank 0 and elsewhere nothing."""
        mine = tuple(self.column(i, bool if i == FRESH else float) for i in range(5))
        self.loss, self.microbatches = ranks.total(self.loss), self.microbatches * ranks.shares
        self.parts = ranks.gathered(mine)

    def column(self, which: int, dtype: type = float) -> np.ndarray:
        """LOG_RATIO, LOG_MOVE, ADVANTAGES, FRESH or ENTROPY of all its tokens: [M]."""
        return joined([part[which] for part in self.parts], dtype)


Asked = tuple[np.ndarray, np.ndarray, np.ndarray]  # log p - log mu, advantages and fresh of a row, [M] each


def asked(rows: Sequence[Row]) -> list[Asked]:
    """Of the rows whose log-probabilities under the policy before the batch are known."""
    return [(row.proximal - row.behaviour, row.advantages, (row.lags == 0) & row.one_version)
            for row in rows if row.proximal is not None]


def of_batch(steps: Sequence[MiniStep], before: Sequence[Asked], settings: config.Algorithm, several: bool) -> Metrics:
    """Figures of a batch from its applied mini-steps and what was asked before them. See "Several optimizer steps" in
    docs/guides/algorithms.md.

    Divergence from the sampler is that before the batch: of all tokens when they were asked then, else of the first
    mini-step's. With several, `clip_share` is over all of them, by the ratio that is clipped; `k3_last` and `clip_share_last`
    are of the last; loss is the mean, grad_norm the largest, entropy over all their tokens.
    """
    first = steps[0] if steps else MiniStep()
    start = [first.column(LOG_RATIO), first.column(ADVANTAGES), first.column(FRESH, bool)]
    if before:
        start = [np.concatenate(part) for part in zip(*before, strict=True)]
    low, high = settings.clip_low, settings.clip_high
    found = diagnostics.divergence(start[0], start[1], start[2], low, high)
    entropy_M = joined([step.column(ENTROPY) for step in steps])
    found |= {
        "loss": sum(step.loss for step in steps) / max(len(steps), 1),
        "grad_norm": max((step.grad_norm for step in steps), default=0.0),
        "microbatches": sum(step.microbatches for step in steps),
        "entropy": float(entropy_M.mean()) if len(entropy_M) else 0.0, "mini_steps": len(steps)}
    if several:
        last = steps[-1] if steps else MiniStep()
        found |= {
            "clip_share": _clip_share(steps, low, high), "clip_share_last": _clip_share([last], low, high),
            "k3_last": _divergence(last, LOG_RATIO, low, high)["k3"]}
    return found


def mean_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of equal keys."""
    return {key: sum(part[key] for part in parts) / len(parts) for key in parts[0]} if parts else {}


def load_of(steps: Sequence[MiniStep]) -> list[torch.Tensor] | None:
    """Tokens by layer and expert of all mini-steps together; None when there was none."""
    return [torch.stack(counts).sum(0) for counts in zip(*(step.load for step in steps), strict=True)] if steps else None


def joined(parts: Sequence[np.ndarray], dtype: type = float) -> np.ndarray:
    """One after the other; empty, of `dtype`, when there is none."""
    return np.concatenate(parts) if len(parts) else np.zeros(0, dtype)


def _clip_share(steps: Sequence[MiniStep], low: float, high: float) -> float | None:
    return diagnostics.divergence(
        joined([s.column(LOG_MOVE) for s in steps]), joined([s.column(ADVANTAGES) for s in steps]),
        joined([s.column(FRESH, bool) for s in steps], bool), low, high)["clip_share"]


def _divergence(step: MiniStep, which: int, low: float, high: float) -> dict[str, float | None]:
    return diagnostics.divergence(step.column(which), step.column(ADVANTAGES), step.column(FRESH, bool), low, high)
