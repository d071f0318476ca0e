"""The key/value cache: one fixed tensor per layer, a row per slot, written at per-row positions.

It plugs into any transformers model through the `Cache` interface. A *pass* (one model forward) is announced first: either a
prompt pass, whose keys and values stay local to the pass and are copied to all slots that share the prompt, or a decode pass,
which writes one position of each row and reads the row up to `length`.

Axes: S slots (+1 scratch slot for padding rows), C context, H key/value heads, D head dim, B rows of a pass, Q tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from slipstream.errors import InvalidInput

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(slots=True)
class PromptPass:
    """Row `source_R[i]` of the pass becomes the content of slot `slots_R[i]`."""

    slots_R: torch.Tensor  # int64 [R]
    source_R: torch.Tensor  # int64 [R]


@dataclass(slots=True)
class DecodePass:
    """One token for each row, written at `positions_B` of `slots_B`; then positions [0, length) are read."""

    slots_B: torch.Tensor  # int64 [B]
    positions_B: torch.Tensor  # int64 [B]
    length: int
    in_place: bool  # the slots are 0..B-1: read them without a copy
    _cells: dict[int, torch.Tensor] = field(default_factory=dict)

    def cells(self, heads: int, context: int) -> torch.Tensor:
        """Where the new vectors go in a cache seen as [S * H * C, D]: int64 [B * H], computed once for all layers."""
        if heads not in self._cells:
            head_H = torch.arange(heads, device=self.slots_B.device)
            cells_B_H = (self.slots_B[:, None] * heads + head_H) * context + self.positions_B[:, None]
            self._cells[heads] = cells_B_H.reshape(-1)
        return self._cells[heads]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one attention layer, [S + 1, H, C, D] each; shapes are learnt from the first update."""

    def __init__(self, slots: int, context: int) -> None:
        super().__init__()
        self.slots, self.context = slots, context
        self.step: PromptPass | DecodePass | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def room(like: torch.Tensor) -> torch.Tensor:
            shape = (self.slots + 1, like.shape[1], self.context, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, H, Q, D] of the pass in, [B, H, length, D] to attend to out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        step = self.step
        if isinstance(step, PromptPass):
            width = min(key_states.shape[2], self.context)
            for cache, new in ((self.keys, key_states), (self.values, value_states)):
                cache[:, :, :width].index_copy_(0, step.slots_R, new[:, :, :width].index_select(0, step.source_R))
            return key_states, value_states
        assert step is not None
        return self._append(self.keys, key_states, step), self._append(self.values, value_states, step)

    def _append(self, cache: torch.Tensor, new: torch.Tensor, step: DecodePass) -> torch.Tensor:
        heads, context, dim = cache.shape[1:]
        if torch.compiler.is_compiling():  # a form that the compiler writes in place
            cache[step.slots_B, :, step.positions_B] = new[:, :, 0]
            return cache[: new.shape[0], :, : step.length]
        cache.view(-1, dim).index_copy_(0, step.cells(heads, context), new.reshape(-1, dim))
        if step.in_place:
            return cache[: len(new), :, : step.length]
        return cache[:, :, : step.length].index_select(0, step.slots_B)

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of the slots `source` to the slots `target`."""
        for cache in (self.keys, self.values):
            if cache is not None:
                cache[:, :, :length].index_copy_(0, target, cache[:, :, :length].index_select(0, source))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.context, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.context


class SlotCache(Cache):
    """All layers. Raises InvalidInput, naming the family, when a layer keeps state other than keys and values."""

    layers: list[SlotLayer]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: PretrainedConfig, slots: int, context: int) -> None:
        self.layer_types = _layer_types(config)
        super().__init__(layers=[SlotLayer(slots, context) for _ in self.layer_types])

    def begin(self, step: PromptPass | DecodePass | None) -> None:
        """Announce the next model forward; None takes it back."""
        for layer in self.layers:
            layer.step = step

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        for layer in self.layers:
            layer.move(source, target, length)


class Masks:
    """Additive attention masks in the form that the model's layers expect: 0 where a query may look, else the lowest number."""

    def __init__(
        self, config: PretrainedConfig, layer_types: list[str], dtype: torch.dtype, device: torch.device, size: int
    ) -> None:
        self.kinds = sorted(set(layer_types))
        self.window: int = getattr(config, "sliding_window", None) or size
        self.nothing = torch.zeros((), dtype=dtype, device=device)
        self.lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        self.columns = torch.arange(size, device=device)

    def of(self, positions_B_Q: torch.Tensor, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """[B, 1, Q, length] for queries at these positions over keys at 0..length-1; a dict by layer type for mixed models."""
        distance = positions_B_Q[:, None, :, None] - self.columns[:length]
        masks = {}
        for kind in self.kinds:
            seen = distance >= 0
            if kind == SLIDING and (torch.compiler.is_compiling() or length > self.window):
                seen &= distance < self.window
            masks[kind] = torch.where(seen, self.nothing, self.lowest)
        return masks if len(masks) > 1 else masks[self.kinds[0]]


def _layer_types(config: PretrainedConfig) -> list[str]:
    layer_types, _ = get_layer_types_and_kwargs(config)
    if other := sorted(set(layer_types) - {FULL, SLIDING}):
        raise InvalidInput(
            f"model type {config.model_type} has layers of type {', '.join(other)}: the torch engine keeps keys and values "
            "only; use another model or engine", "MODEL_FAMILY", model_type=config.model_type)
    return layer_types
