"""Attention of the fast decode pass: one query per row, as two batched products.

torch's fused kernel takes heads one by one, which for one query costs more than the arithmetic: these products take two thirds
of its time, for the demo's rows. Anything but a plain fp32 decode pass on the CPU goes to transformers' own function.

Axes: B rows, H query heads, K key/value heads, G = H / K query heads of each, L positions, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "one_query"
_SPECIAL = ("position_bias", "softcap", "s_aux")  # what some families add; the fused function knows, or refuses them


def use(model: Any) -> None:
    """Let a model on the CPU that runs on torch's fused kernel decode by `one_query`."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and model.device.type == "cpu" and model.dtype == torch.float32:
        config._attn_implementation = NAME


def one_query(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, H, 1, D] over [B, K, L, D] with an additive mask [B, 1, 1, L]: [B, 1, H, D]."""
    batch, heads, queries, dim = query.shape
    special = dropout or query.dtype != torch.float32 or any(kwargs.get(name) is not None for name in _SPECIAL)
    if special or queries != 1 or scaling is None or attention_mask is None or (
            attention_mask.dtype != query.dtype or attention_mask.shape != (batch, 1, 1, key.shape[2])):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    kinds, length = key.shape[1:3]
    group = heads // kinds
    mask = attention_mask.expand(batch, kinds, group, length).reshape(batch * kinds, group, length)
    scores = torch.baddbmm(
        mask, query.reshape(batch * kinds, group, dim), key.reshape(batch * kinds, length, dim).transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(scores.softmax(dim=-1), value.reshape(batch * kinds, length, value.shape[3]))
    return mixed.view(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, one_query)
AttentionMaskInterface.register(NAME, sdpa_mask)
