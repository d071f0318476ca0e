"""Attention in rows of several segments: each segment sees itself alone, and nothing is computed between two of them.

Axes: N tokens of a packed row, S segments of a stretch, L tokens of its longest, H heads of queries, G of keys and values, D
their size.

    hidden [1, N, ...]: everything but attention, on every token once and on no padding
    q [1, H, N, D], k and v [1, G, N, D] ──index_select, stretch by stretch──► [S, H, L, D], right-padded
      attention as in rows that hold one segment, with the mask of positions 0..L-1   ──index_select──► [1, N, H, D]

A dense mask of a packed row costs N^2 scores; this costs the sum of S L^2, and full attention needs no mask (`is_causal`), so
torch's fused kernels run on any device. A stretch is segments of about one length: see `stretches`. Padding of a stretch comes
last in a causal mask and is left out afterwards: no token sees it, no gradient comes of it.

transformers asks two registries for what `config._attn_implementation` names; ours are there as "slipstream_packed_" + the
implementation that runs within. Masks are asked of the row's first segment, which is its longest: windows and chunks are
counted within a segment, also by families that build their masks without position_ids (gpt-oss). Without `laid` they are that
implementation, unchanged. flash_attention_* is left alone: it reads the segments of a row from position_ids (its varlen
kernels; not yet run on a GPU). Linear attention carries a state along a row: its modules, too, run stretch by stretch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.trainer.packing import Microbatch
from slipstream.errors import ConfigError

PREFIX = "slipstream_packed_"
WITHIN = ("sdpa", "eager")  # implementations that may run within
REMEDY = "; set trainer.packing = rows"
STRETCH = 0.75  # of its longest, that the shortest segment of a stretch has at least
TRIED = (9, 7, 9, 2)  # tokens of the segments in `verify`
# Largest mean of the positions' relative errors in `verify`, as in parallel/context.py.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02}
EXACT = 1e-4  # of float32 and float64


@dataclass(frozen=True, slots=True)
class Stretch:
    """Segments of about one length."""

    count: int  # S
    length: int  # L
    index_SL: torch.Tensor  # int64: where in the row their tokens are; a padded place repeats its segment's last


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed row."""

    stretches: Sequence[Stretch]
    back_N: torch.Tensor  # int64: where each token of the row is in all stretches, one after the other


@dataclass(frozen=True, slots=True)
class Masks:
    """What a layer's attention is given in place of a mask."""

    layout: Layout
    of_stretch: Sequence[torch.Tensor | None]  # [1, 1, L, L] each


# Of the forward pass that runs now. A plain global: on a GPU layers are computed again in autograd's own threads.
_layout: Layout | None = None


@contextmanager
def keeping(row: Layout | None) -> Iterator[None]:
    """Within it a model's input is this packed row, and its attention keeps to segments."""
    global _layout
    before, _layout = _layout, row
    try:
        yield
    finally:
        _layout = before


@contextmanager
def laid(batch: Microbatch, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """A forward pass of `batch` belongs inside. Gives what the model's forward takes besides."""
    if batch.positions is None:
        yield {}
        return
    with keeping(layout(batch.starts, batch.sizes, device)):
        yield {"position_ids": torch.from_numpy(batch.positions).to(device)}


def now() -> Layout | None:
    """The packed row of the forward pass that runs now, for whoever runs a part of it again."""
    return _layout


def stretches(sizes: Sequence[int]) -> list[list[int]]:
    """Segments by about one length: longest first (stable), a new stretch where one is under 3/4 of its stretch's longest.

    At most 16/9 of the scores are padding's, and 1000 times the length makes 25 stretches at most.

    Example: sizes 4 9 8 3 9 -> [1 4 2] [0 3]: 8 is over 6.75, 4 is not, and 3 is 3/4 of 4.
    """
    found: list[list[int]] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if found and sizes[i] >= STRETCH * sizes[found[-1][0]]:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def layout(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Layout:
    """Of a row whose segments begin at `starts` and have `sizes` tokens, int64 [S] each, the longest first."""
    made: list[Stretch] = []
    back_N, base = np.zeros(int(sizes.sum()), np.int64), 0
    for members in stretches(sizes.tolist()):
        own_S, sizes_S = starts[members], sizes[members]
        within = np.arange(sizes_S[0])
        index_S_L = own_S[:, None] + np.minimum(within, sizes_S[:, None] - 1)
        real_S_L = within < sizes_S[:, None]
        back_N[index_S_L[real_S_L]] = base + np.flatnonzero(real_S_L)
        base += index_S_L.size
        made.append(Stretch(len(members), len(within), torch.from_numpy(index_S_L.reshape(-1)).to(device)))
    return Layout(made, torch.from_numpy(back_N).to(device))


def attach(model: Any) -> Any:
    """Let the model's attention keep to segments inside `laid`. Returns it.

    Raises ConfigError, with the remedy, for a family in which more than attention looks along a row.
    """
    shape = model.config.get_text_config()
    within = str(shape._attn_implementation)
    known = {"full_attention", "sliding_attention", "chunked_attention", *(["linear_attention"] if linear(model) else [])}
    odd = sorted(set(getattr(shape, "layer_types", None) or ()) - known)
    rope = getattr(shape, "rope_parameters", None) or {}
    ropes = {str(part.get("rope_type", "")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    why = ""
    if odd or (model._is_stateful and not linear(model)):
        why = f"its layers ({', '.join(odd) or 'recurrent'}) carry a state along a row, from one segment into the next"
    elif found := ropes & {"dynamic", "longrope"}:
        why = f"its rope_type {', '.join(found)} depends on the length of the whole row"
    elif not model._can_set_attn_implementation() or not (within in WITHIN or within.startswith("flash_attention")):
        why = f"its attention ({within}) does not go through transformers' attention interface"
    if why:
        raise _refusal(model, why)
    if within in WITHIN:
        model.set_attn_implementation(PREFIX + within)
        if model.config.get_text_config()._attn_implementation != PREFIX + within:
            raise _refusal(model, "it does not let its attention be set")
    for module in linear(model):
        _by_stretch(module)
    return model


def linear(model: Any) -> list[Any]:
    """Modules of linear attention, by the name that families of Qwen3-Next's kind give them."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == "linear_attn"]


@torch.no_grad()
def verify(model: Any) -> None:
    """Try it: logits of segments that share a row are those of each alone. Two small forward passes.

    Raises ConfigError, with the remedy, for a model in which they are not.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    sizes = np.array(TRIED, np.int64)
    real = torch.arange(max(TRIED)) < torch.from_numpy(sizes)[:, None]
    alone = (torch.arange(real.numel()).reshape(real.shape) * 7 % (vocabulary - 1) + 1) * real
    positions = torch.cat([torch.arange(size) for size in TRIED])[None]
    alone, real, positions = (tensor.to(model.device) for tensor in (alone, real, positions))
    expected = _whole(model(input_ids=alone, use_cache=False).logits)[real].double()
    try:
        with keeping(layout(np.cumsum(sizes) - sizes, sizes, model.device)):
            found = _whole(model(input_ids=alone[real][None], position_ids=positions, use_cache=False).logits)[0].double()
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise _refusal(model, f"it does not run on a packed row ({' '.join(str(error).split())[:200]})") from error
    error = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).mean())
    if not error < TOLERANCE.get(model.dtype, EXACT):
        raise _refusal(model, f"it computes something else from segments that share a row (relative error {error:.1e})")


def _refusal(model: Any, why: str) -> ConfigError:
    return ConfigError(f"trainer.packing = packed does not fit {type(model).__name__}: {why}{REMEDY}")


def _attention(within: str) -> Callable[..., tuple[torch.Tensor, Any]]:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        implementation = ALL_ATTENTION_FUNCTIONS[within] if within != "eager" else own_eager(module)
        if not isinstance(attention_mask, Masks):
            if _layout is not None:
                raise ValueError(f"{type(module).__name__} has a mask of its own, which may not keep to segments")
            return implementation(module, query, key, value, attention_mask, **options)
        parts = []
        for stretch, mask in zip(attention_mask.layout.stretches, attention_mask.of_stretch, strict=True):
            own = options if mask is not None else options | {"is_causal": True}  # families may say False when they see a mask
            found = implementation(module, *(_taken(x, stretch) for x in (query, key, value)), mask, **own)[0]
            parts.append(found.reshape(-1, *found.shape[2:]))
        return torch.cat(parts).index_select(0, attention_mask.layout.back_N)[None], None

    return attention


def _taken(heads: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """[1, H, N, D] -> [S, H, L, D]"""
    _, count, _, size = heads.shape
    return heads[0].index_select(1, stretch.index_SL).view(count, stretch.count, stretch.length, size).transpose(0, 1)


def _by_stretch(module: Any) -> None:
    """Let a module with a state along the sequence begin anew at each segment: [1, N, H] -> [1, N, H]."""
    whole = module.forward

    def forward(hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if (row := _layout) is None:
            return whole(hidden_states, *arguments, **options)
        parts = [
            whole(hidden_states[0].index_select(0, s.index_SL).view(s.count, s.length, -1), *arguments, **options)
            for s in row.stretches]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).index_select(0, row.back_N)[None]

    module.forward = forward


def own_eager(module: Any) -> Callable[..., Any]:
    """A family's own eager attention: every one has it in the file of its model."""
    for kind in type(module).__mro__:
        if found := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
            return found
    raise ValueError(f"{type(module).__name__} has no eager attention in its file")


def _mask(within: str) -> Callable[..., Any]:
    def mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
        make = ALL_MASK_ATTENTION_FUNCTIONS[within]
        if (row := _layout) is None:
            return make(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
        if batch_size != 1 or q_length != len(row.back_N) or options.get("attention_mask") is not None:
            raise ValueError("a mask of padding, or of another shape, was given with a packed row")
        # Of one segment a plain causal mask is left out, as without packing; `use_vmap` says that a family adds to it.
        options["allow_is_causal_skip"] = not options.get("use_vmap")
        return Masks(row, [
            make(batch_size=1, q_length=s.length, kv_length=s.length, **options) for s in row.stretches])

    return mask


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


for _name in WITHIN:
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + _name, _attention(_name))
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + _name, _mask(_name))
