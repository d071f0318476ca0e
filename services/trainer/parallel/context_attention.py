"""Attention over a sequence that lies in pieces on several ranks: all tokens of some heads, not some tokens of all heads.

Axes: R rows, T tokens of a whole row, C ranks that share it, H heads of queries, G heads of keys and values, D their size. A
rank has t = T / C tokens, in the order of ranks.

    q [R, H, t, D], k and v [R, G, t, D]  ──all-to-all──►  [R, H/C, T, D], [R, G'/C, T, D]
    attention as on one rank, with the mask of the whole row   ──all-to-all──►  [R, t, H, D]

DeepSpeed-Ulysses (arXiv 2309.14509, section 3). An all-to-all of equal blocks is its own transpose: the gradient goes back the
way the values came. With G < C the heads of keys and values are repeated until they divide: G' = G · r.

transformers asks two registries for what `config._attn_implementation` names, one for attention and one for masks; ours are
there as "slipstream_context_" + the implementation that runs within. Without `dividing` they are that one, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from services.trainer import packed_attention

PREFIX = "slipstream_context_"
WITHIN = ("sdpa", "eager")  # implementations that may run within

# The group that shares the sequences of the forward pass that runs now. A plain global: on a GPU layers are computed again in
# autograd's own threads.
_sharing: dist.ProcessGroup | None = None


@contextmanager
def dividing(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within it, a model's inputs are this rank's part of sequences that `group` shares."""
    global _sharing
    before, _sharing = _sharing, group
    try:
        yield
    finally:
        _sharing = before


def kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch.utils.checkpoint: what is computed again is divided, or keeps to segments, as it was the first time."""
    if (row := packed_attention.now()) is not None:
        return nullcontext(), packed_attention.keeping(row)
    return nullcontext(), dividing(_sharing)


def ulysses(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[R, H, t, D] and twice [R, G, t, D] -> [R, t, H, D].

    `attend` gets this rank's heads over whole rows, in this order, and gives [R, T, H/C, D]. Collective.
    Raises ValueError when C does not divide H, or G does not divide H.
    """
    ranks, heads = group.size(), query.shape[1]
    times = repeats(heads, key.shape[1], ranks)
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    found = attend(*_to_heads((query, key, value), group))
    rows, tokens, mine, size = found.shape
    blocks = found.reshape(rows, ranks, tokens // ranks, mine, size).transpose(0, 1).contiguous()
    return _Swap.apply(blocks, group).permute(1, 2, 0, 3, 4).reshape(rows, tokens // ranks, heads, size)  # pyright: ignore


def repeats(heads: int, key_heads: int, ranks: int) -> int:
    """How often each head of keys and values is repeated, so that every rank gets those that its queries read: the least r."""
    if heads % ranks or heads % key_heads:
        raise ValueError(f"{heads} heads of queries, {key_heads} of keys and values and {ranks} ranks do not divide")
    shared = heads // key_heads
    return next(r for r in range(1, shared + 1) if not shared % r and not key_heads * r % ranks)


class _Swap(torch.autograd.Function):
    """Block i of dimension 0 to rank i of the group; block i of the result comes from rank i."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _swapped(blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _swapped(gradients[0], ctx.group), None


def _swapped(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    dist.all_to_all_single(found, blocks.contiguous(), group=group)
    return found


def _to_heads(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """[R, N, t, D] each -> [R, N/C, T, D], in one collective."""
    ranks = group.size()
    sent = [x.reshape(len(x), ranks, -1, *x.shape[2:]).transpose(0, 1).reshape(ranks, -1) for x in tensors]
    came = _Swap.apply(torch.cat(sent, dim=1), group).split([part.shape[1] for part in sent], dim=1)  # pyright: ignore
    return [
        part.view(ranks, len(x), x.shape[1] // ranks, *x.shape[2:]).permute(1, 2, 0, 3, 4)
        .reshape(len(x), x.shape[1] // ranks, -1, x.shape[3]).to(x.dtype)
        for part, x in zip(came, tensors, strict=True)]


def gathered(hidden: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[R, t, H] of each rank -> [R, T, H] on all of them. Gradients of all ranks are added up. Collective."""
    blocks = _Swap.apply(hidden.expand(group.size(), *hidden.shape), group)
    return blocks.transpose(0, 1).reshape(len(hidden), -1, hidden.shape[-1])  # pyright: ignore


def whole_rows(module: Any) -> None:
    """Let a module with a state along the sequence (linear attention) compute whole rows on every rank, and keep its tokens.

    That divides neither its work nor what it keeps for the backward pass; of the gradient each rank has the part of its tokens.
    """
    def before(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if (group := _sharing) is None:
            return None
        if args:
            return (gathered(args[0], group), *args[1:]), options
        return args, options | {"hidden_states": gathered(options["hidden_states"], group)}

    def after(_: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        return None if _sharing is None else output.chunk(_sharing.size(), dim=1)[_sharing.rank()]

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _Heads:
    """An attention module as its own implementation may see it: with this rank's heads."""

    def __init__(self, module: Any, groups: int, sinks: torch.Tensor | None) -> None:
        self._module, self.num_key_value_groups = module, groups
        if sinks is not None:
            self.sinks = sinks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attention(within: str) -> Callable[..., tuple[torch.Tensor, None]]:
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        implementation = ALL_ATTENTION_FUNCTIONS[within] if within != "eager" else packed_attention.own_eager(module)
        if (group := _sharing) is None:
            return implementation(module, query, key, value, attention_mask, **options)
        if unknown := {"position_bias", "cu_seq_lens_q"} & {name for name, given in options.items() if given is not None}:
            raise ValueError(f"{type(module).__name__} gives its attention {sorted(unknown)}, which belongs to whole sequences")
        options.pop("position_ids", None)  # of this rank's tokens; rotated in already
        sinks = options.get("s_aux")
        if sinks is not None:
            sinks = options["s_aux"] = sinks.chunk(group.size())[group.rank()]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            heads = _Heads(module, query.shape[1] // key.shape[1], sinks)
            return implementation(heads, query, key, value, attention_mask, **options)[0]

        return ulysses(query, key, value, group, attend), None

    return attention


def _mask(within: str) -> Callable[..., torch.Tensor | None]:
    def mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> torch.Tensor | None:
        """Of whole rows: padding comes last and everything is causal, so that nothing else is known of the other ranks."""
        if _sharing is not None:
            if options.get("attention_mask") is not None:
                raise ValueError("a mask of padding was given with a part of a sequence")
            q_length, kv_length = q_length * _sharing.size(), kv_length * _sharing.size()
        return ALL_MASK_ATTENTION_FUNCTIONS[within](
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)

    return mask


for _name in WITHIN:
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + _name, _attention(_name))
    ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + _name, _mask(_name))
