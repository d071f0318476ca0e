"""AdamW over the model's parameters, one clipped step of it, and the ramp of the warm-up."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from slipstream import config
from slipstream.errors import SlipstreamError


class NonFinite(SlipstreamError):
    """A loss or gradient norm that is NaN or infinite. Nothing was applied, the gradients are dropped."""


def adamw(model: nn.Module, settings: config.Trainer, learning_rate: float) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) with a fused kernel. Weight decay acts on matrices, not on norms and biases."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=learning_rate, betas=settings.betas, eps=settings.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def ramp(step: int, ramp_steps: int) -> float:
    """min(1, (step + 1) / ramp_steps) for step = 0, 1, ...: the share of the peak learning rate."""
    return min(1.0, (step + 1) / ramp_steps)


def clipped_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], max_norm: float, what: str, loss: float = 0.0,
) -> float:
    """Clip the global gradient norm, step, drop the gradients. Returns the norm before clipping.

    Raises NonFinite, with nothing applied, when the norm or `loss` is not finite.
    """
    norm = float(nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True))
    if not (norm < float("inf") and math.isfinite(loss)):
        optimizer.zero_grad(set_to_none=True)
        raise NonFinite(
            f"{what}: the gradient norm is {norm}, the loss {loss}; nothing was applied. Lower trainer.learning_rate, or look "
            "at the batch log", "NON_FINITE_GRADIENT")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
