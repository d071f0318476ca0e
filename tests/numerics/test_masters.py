"""Training in bfloat16 with a small learning rate: the weights move, because the optimizer moves float32 masters."""

from __future__ import annotations

import torch
from torch import nn

from services.trainer import snapshot
from services.trainer.optimizer import MasterAdamW, adamw, clipped_step
from slipstream.config import Trainer

SETTINGS = Trainer(learning_rate=1e-6, weight_decay=0.1)


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)).to(torch.bfloat16).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for n, p in enumerate(model.parameters()):  # gradients that bfloat16 holds exactly
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 10 + n)).bfloat16().to(p.dtype)
        clipped_step(optimizer, model.parameters(), 1e9, "")


def test_the_masters_are_what_float32_training_gives() -> None:
    small, full = _model(torch.bfloat16), _model(torch.float32)
    ours = adamw(small, SETTINGS, 1e-6)
    assert isinstance(ours, MasterAdamW) and not isinstance(adamw(full, SETTINGS, 1e-6), MasterAdamW)
    _train(small, ours, 30)
    _train(full, adamw(full, SETTINGS, 1e-6), 30)
    for p, reference in zip(small.parameters(), full.parameters(), strict=True):
        assert torch.equal(ours.state[p]["master"], reference)
        assert torch.equal(p, reference.bfloat16())


def test_without_masters_nothing_would_move() -> None:
    """What the masters are for: plain AdamW rounds a step of 1e-6 away, for ever."""
    before, plain, ours = _model(torch.bfloat16), _model(torch.bfloat16), _model(torch.bfloat16)
    _train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-6, weight_decay=0), 300)
    _train(ours, adamw(ours, Trainer(learning_rate=1e-6), 1e-6), 300)
    moved = [sum(int((p != q).sum()) for p, q in zip(m.parameters(), before.parameters(), strict=True)) for m in (plain, ours)]
    total = sum(p.numel() for p in before.parameters())
    assert moved[0] < 0.05 * total and moved[1] > 3 * moved[0], (moved, total)


def test_a_resumed_run_has_the_same_masters() -> None:
    """Bit for bit: masters made anew from the rounded weights would forget what no step has shown yet."""
    through, first, second = (_model(torch.bfloat16) for _ in range(3))
    optimizers = [adamw(m, SETTINGS, 1e-6) for m in (through, first, second)]
    for model, optimizer in ((through, optimizers[0]), (first, optimizers[1])):
        _train(model, optimizer, 10)
    snapshot.restore(second, optimizers[2], snapshot.take(first, optimizers[1]))
    for model, optimizer in ((through, optimizers[0]), (second, optimizers[2])):
        _train(model, optimizer, 10)
    for p, resumed in zip(through.parameters(), second.parameters(), strict=True):
        assert torch.equal(optimizers[0].state[p]["master"], optimizers[2].state[resumed]["master"]) and torch.equal(p, resumed)
