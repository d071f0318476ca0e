"""Routers of 16-bit models compute in float32: logits, scores, choice and weights.

Most families multiply hidden states with the router's weights in the model's type and go to float32 afterwards, if at all
(docs/guides/algorithms.md has each). In bfloat16 two experts whose logits differ in the third digit are then equal, and which
one is taken depends on the kernel: trainer and sampler choose differently. Both build their models through slipstream.model, so
both compute float32 from the first product on. Weights stay 16-bit, as they are trained and shipped.

Routers are found as transformers itself records them: the modules behind `router_logits`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

HALF = (torch.bfloat16, torch.float16)


def router_modules(model: Any) -> list[tuple[nn.Module, int]]:
    """Modules whose output holds router logits, in the order of layers, and where in it. Empty when none are recorded."""
    recorders = [
        recorder for part in model.modules()
        if (recorder := (getattr(type(part), "_can_record_outputs", None) or {}).get("router_logits")) is not None]
    if not recorders:
        return []
    recorder = recorders[-1]
    kind, index = getattr(recorder, "target_class", recorder), getattr(recorder, "index", 0)
    within = getattr(recorder, "layer_name", None)
    return [(m, index) for path, m in model.named_modules() if isinstance(m, kind) and (within is None or within in path)]


def compute_in_float32(model: Any) -> int:
    """Make the model's 16-bit routers compute in float32. Returns how many there are; 0 for a float32 or dense model."""
    routers = [m for m, _ in router_modules(model) if any(p.dtype in HALF for p in m.parameters())]
    for router in routers:
        _Float32Products(router)
    return len(routers)


class _Float32Products(TorchFunctionMode):
    """While a router runs, its products are taken in float32, and what follows from them stays there."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self._entered = 0
        router.register_forward_pre_hook(self._before)
        router.register_forward_hook(self._after, always_call=True)

    def _before(self, *_: object) -> None:
        self._entered += 1
        self.__enter__()

    def _after(self, *_: object) -> None:
        if self._entered:
            self._entered -= 1
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.linear, torch.matmul, torch.Tensor.matmul):
            args = tuple(_float(a) for a in args)
            kwargs = {name: _float(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value
