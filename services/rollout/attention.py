"""Attention of the fast decode pass: one query per row, as two batched products or, where it may be compiled, one C kernel.

torch's fused kernel takes heads one by one, which for one query costs more than the arithmetic: the products take two thirds
of its time, for the demo's rows, and the kernel, which reads each row only as far as it goes, 0.4 of the products'. Anything
but a plain fp32 decode pass on the CPU goes to transformers' own function.

Axes: B rows, H query heads, K key/value heads, G = H / K query heads of each, L positions, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from services.rollout import native
from slipstream import logs
from slipstream.errors import ConfigError

NAME, NATIVE = "one_query", "one_query_native"
log = logs.get("rollout")
_SPECIAL = ("position_bias", "softcap", "s_aux")  # what some families add; the fused function knows, or refuses them


def use(model: Any, compiled: str = "none") -> None:
    """Let a model on the CPU that runs on torch's fused kernel decode by `one_query`, or by the kernel in C.

    `compiled` is rollout.compile. The kernel has one thread: a process with more keeps the products. Raises ConfigError when
    the kernel is asked for and cannot be compiled; with "auto" that is logged.
    """
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and model.device.type == "cpu" and model.dtype == torch.float32:
        config._attn_implementation = NAME
        if compiled != "none" and torch.get_num_threads() == 1:
            try:
                native.kernel()
                config._attn_implementation = NATIVE
            except ConfigError as error:
                if compiled != "auto":
                    raise
                log.info(f"attention is not compiled: {error}")


def one_query(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """[B, H, 1, D] over [B, K, L, D] with an additive mask [B, 1, 1, L]: [B, 1, H, D]."""
    if scaling is None or attention_mask is None or not _plain(query, key, attention_mask, dropout, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch, heads, _, dim = query.shape
    kinds, length = key.shape[1:3]
    group = heads // kinds
    mask = attention_mask.expand(batch, kinds, group, length).reshape(batch * kinds, group, length)
    scores = torch.baddbmm(
        mask, query.reshape(batch * kinds, group, dim), key.reshape(batch * kinds, length, dim).transpose(1, 2), alpha=scaling)
    mixed = torch.bmm(scores.softmax(dim=-1), value.reshape(batch * kinds, length, value.shape[3]))
    return mixed.view(batch, 1, heads, value.shape[3]), None


def one_query_native(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The same by the kernel in C, for keys and values whose vectors are dense."""
    if scaling is None or attention_mask is None or not _plain(query, key, attention_mask, dropout, kwargs) or (
            not key.stride(3) == value.stride(3) == attention_mask.stride(3) == 1):
        return one_query(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    call = native.one_query_op if torch.compiler.is_compiling() else native.one_query
    return call(query, key, value, attention_mask, scaling), None


def _plain(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, dropout: float, more: dict[str, Any]) -> bool:
    """Whether this is a decode pass with nothing added to it."""
    special = dropout or query.dtype != torch.float32 or any(more.get(name) is not None for name in _SPECIAL)
    return not special and query.shape[2] == 1 and mask.dtype == query.dtype and (
        mask.shape == (query.shape[0], 1, 1, key.shape[2]))


for _name, _function in ((NAME, one_query), (NATIVE, one_query_native)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)
