"""AdamW over the model's parameters, one clipped step of it, and the ramp of the warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.adamw import adamw as functional_adamw

from slipstream import config
from slipstream.errors import SlipstreamError


class NonFinite(SlipstreamError):
    """A loss or gradient norm that is NaN or infinite. Nothing was applied, the gradients are dropped."""


class MasterAdamW(torch.optim.AdamW):
    """AdamW for parameters of fewer bits: it moves float32 masters, kept in its state, and the parameters are their rounding.

    Without them a step of 1e-6 is lost in bfloat16, whose neighbours lie 1e-3 of a value apart (arXiv 1710.03740, section 3.1).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "a step without a closure alone"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    master = p.float()
                    self.state[p] = {
                        "step": torch.zeros(()), "exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master),
                        "master": master}
            states = [self.state[p] for p in parameters]
            masters = [s["master"] for s in states]
            beta1, beta2 = group["betas"]
            functional_adamw(
                masters, [p.grad.float() for p in parameters], [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states], fused=True, amsgrad=False, beta1=beta1,
                beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)


def adamw(model: nn.Module, settings: config.Trainer, learning_rate: float) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101, algorithm 2) with a fused kernel, with masters where a parameter has fewer than 32 bits.

    Weight decay acts on matrices, not on norms and biases.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    small = any(p.dtype.itemsize < 4 for p in model.parameters() if p.requires_grad)
    return (MasterAdamW if small else torch.optim.AdamW)(
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
