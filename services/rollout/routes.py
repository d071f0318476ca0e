"""Which experts the router chose, captured for any family that transformers runs through its experts interface.

Every such block calls `experts(hidden, indices [N, K], weights [N, K])` with global expert ids: listening there sees the
router's final choice whatever the family does before it (softmax, sigmoid, group limits, selection bias).

Axes: N tokens of a pass, L MoE layers in depth order, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slipstream.errors import InvalidInput
from slipstream.model import experts_of


class RouteCapture:
    """Collects the indices of one model forward at a time: `with capture: model(...)`, then `capture.take()`."""

    def __init__(self, model: nn.Module) -> None:
        experts = experts_of(model)
        if not experts:
            raise InvalidInput(
                f"{type(model).__name__} has no experts that transformers' interface can see: routes cannot be captured; "
                "set rollout.capture_routes = false", "NO_ROUTER")
        self.layers = len(experts)
        counts = {int(m.num_experts) for m in experts}  # pyright: ignore[reportArgumentType]
        self.dtype = torch.uint8 if max(counts) <= 256 else torch.int32
        self._seen: list[torch.Tensor] = []
        self._on = False
        for module in experts:
            module.register_forward_pre_hook(self._listen, with_kwargs=True)

    def __enter__(self) -> None:
        self._seen, self._on = [], True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _listen(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on:
            self._seen.append(args[1] if len(args) > 1 else kwargs["top_k_index"])

    def take(self) -> torch.Tensor:
        """The routes of the forward that ran last, [N, L, K]."""
        if len(self._seen) != self.layers:
            raise InvalidInput(f"{len(self._seen)} of {self.layers} MoE layers reported their routes", "ROUTES")
        routes = torch.stack(self._seen, dim=1).to(self.dtype)
        self._seen = []
        return routes
