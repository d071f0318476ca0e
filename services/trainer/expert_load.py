"""How many tokens each expert got in a step, replayed routes included.

One hook on each layer's experts, where transformers hands them their indices; padding does not count.

Axes: R rows, T positions, N = R x T, L MoE layers in the order of their calls, E experts, K experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from services.trainer.packing import Microbatch
from services.trainer.ranks import Alone
from slipstream.model import experts_of


def number_of(experts: Any) -> int:
    """Experts of a layer on all ranks: `num_experts` of a module that is spread over some counts its own."""
    return int(getattr(experts, "experts_of_all_ranks", experts.num_experts))


class ExpertLoad:
    """Counts while a forward pass runs inside `counting`. A model without experts has none."""

    def __init__(self, model: nn.Module, ranks: Alone) -> None:
        self._layers, self._ranks = experts_of(model), ranks
        self._counts_E: list[torch.Tensor] = []
        self._real_N: torch.Tensor | None = None
        for layer, experts in enumerate(self._layers):
            experts.register_forward_pre_hook(self._hook(layer), with_kwargs=True)

    @property
    def layers(self) -> int:
        """L."""
        return len(self._layers)

    def begin(self) -> None:
        """A step begins."""
        self._counts_E = [
            torch.zeros(number_of(e) + 1, dtype=torch.int64, device=next(e.parameters()).device) for e in self._layers]

    @contextlib.contextmanager
    def counting(self, batch: Microbatch) -> Iterator[None]:
        """The forward pass of `batch` belongs inside, once a step."""
        if not self._layers or batch.lengths is None:
            yield
            return
        rows, width = batch.inputs.shape
        device = self._counts_E[0].device
        lengths_R = torch.from_numpy(batch.lengths).to(device)
        self._real_N = (torch.arange(width, device=device) < lengths_R[:, None]).reshape(rows * width)
        try:
            yield
        finally:
            self._real_N = None

    def tokens(self) -> list[torch.Tensor]:
        """Tokens of the step so far, of all ranks, by layer and expert: L tensors [E]."""
        return self._ranks.summed([counts[:-1] for counts in self._counts_E])

    def metrics(self, tokens: Sequence[torch.Tensor] | None = None) -> dict[str, float | None]:
        """expert_load_max, _mean: the busiest expert's tokens over the mean of its layer, of the worst layer and on average; 1
        is perfect balance, E / K the worst. dead_experts: (layer, expert) pairs without a token, also as a share. None without
        MoE layers, and when nothing was trained. Of `tokens`, as `self.tokens()` gives them; by default of the step so far.
        """
        found = [counts.double() for counts in tokens or self.tokens() if int(counts.sum())]
        if not found:
            return dict.fromkeys(("expert_load_max", "expert_load_mean", "dead_experts", "dead_expert_share"))
        loads = [float(counts.max() / counts.mean()) for counts in found]
        dead = sum(int((counts == 0).sum()) for counts in found)
        return {
            "expert_load_max": max(loads), "expert_load_mean": sum(loads) / len(loads), "dead_experts": float(dead),
            "dead_expert_share": dead / sum(len(counts) for counts in found)}

    def _hook(self, layer: int) -> Any:
        def count(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._real_N is None:
                return
            counts = self._counts_E[layer]
            indices_N_K = (args[1] if len(args) > 1 else kwargs["top_k_index"]).reshape(len(self._real_N), -1)
            chosen = torch.where(self._real_N[:, None], indices_N_K.long(), len(counts) - 1).reshape(-1)
            counts.scatter_add_(0, chosen, torch.ones_like(chosen))

        return count
