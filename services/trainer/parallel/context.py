"""Long samples: the ranks of a context group share each sequence of a micro-batch, a piece each, and everything but attention
works on its own piece. Attention is context_attention.py's.

Axes: R rows, T tokens of a row, C ranks of a context group, t = ceil(T / C) tokens of a rank, M trained tokens, m of a rank.

    micro-batch [R, T], the same on all C ranks ──part──► [R, t], with positions from rank · t on, and the trained tokens there
      model, experts and logits on [R, t]; log-probabilities [m] ──joined──► [M] on all C ranks ──► the loss, equal on all

Every rank has the whole loss and the gradient of its own log-probabilities: `joined` hands back its part of the gradient
alone, so the sum over ranks counts each token once. Whoever adds up losses counts one rank of each group, as with tensor
parallelism. Rows are not packed (learner.refuse): a row is one segment, so nothing else bounds what a token may look at.

Worked example: C = 2, inputs 5 6 7 with trained index 1 2. Rank 0: inputs 5 6, index 1. Rank 1: inputs 7 and padding, positions
2 3, index 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from services.trainer.packed_attention import linear
from services.trainer.packing import PAD_ID, Microbatch
from services.trainer.parallel.context_attention import PREFIX, WITHIN, dividing, whole_rows
from slipstream import config
from slipstream.errors import ConfigError

PER_POSITION = ("routes", "routed")  # beside `inputs`; `index` and `lengths` are special, the rest is per trained token
PER_SEGMENT = ("starts", "sizes", "members")  # of whole rows: a part has none
REMEDY = "; set context = 1, and bound rollout.max_new_tokens by what fits"
TRIED = 16  # tokens of each rank in `verify`
# Largest mean of the positions' relative errors in `verify`. Tiny models in float32: 1e-7, with linear attention divided 3e-3.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.02}
EXACT = 1e-4  # of float32 and float64


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a micro-batch."""

    batch: Microbatch  # inputs [R, t], and the m trained tokens that lie there
    at: np.ndarray  # bool [M]: which of the whole micro-batch's they are
    positions: torch.Tensor | None  # int64 [1, t]; None: as the model counts


class Context:
    """The context group of this rank. With trainer.parallel.context = 1 everything here hands back what it is given."""

    def __init__(self, settings: config.Parallel) -> None:
        """Collective."""
        self.size, self.number = settings.context, 0
        self.group: dist.ProcessGroup | None = None
        if self.size == 1:
            return
        for ranks in groups(settings.ranks, settings.tensor, self.size):
            made: Any = dist.new_group(ranks, timeout=timedelta(seconds=settings.collective_timeout_s))
            if dist.get_rank() in ranks:
                self.group, self.number = made, ranks.index(dist.get_rank())

    def attach(self, model: Any) -> Any:
        """Let the model's attention be divided when `dividing` says so. Returns it."""
        if self.size > 1:
            model.set_attn_implementation(PREFIX + model.config.get_text_config()._attn_implementation)
            for module in linear(model):
                whole_rows(module)
        return model

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """A forward pass of a `part`. Without it a model sees whole sequences, on each rank its own."""
        with dividing(self.group):
            yield

    def part(self, batch: Microbatch) -> Part:
        """This rank's, of a micro-batch that all ranks of the group have."""
        if self.size == 1:
            return Part(batch, np.ones(len(batch.index), bool), None)
        return share(batch, self.number, self.size)

    def joined(self, part: Part, *values_m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values of the part's trained tokens -> of the whole micro-batch's, [M] each, on every rank of the group."""
        if self.group is None:
            return values_m
        at = torch.from_numpy(part.at).to(values_m[0].device)
        whole = torch.stack([v.new_zeros(len(at)).masked_scatter(at, v) for v in values_m])
        return _Total.apply(whole, self.group).unbind()  # pyright: ignore

    @torch.no_grad()
    def verify(self, model: Any, vocabulary: int) -> None:
        """Try it: logits of a divided sequence are those of the whole one. Collective over all ranks.

        Raises ConfigError, on all of them, for a family in which more than attention looks at other tokens.
        """
        if self.group is None:
            return
        tokens = TRIED * self.size
        ids = (torch.arange(tokens, device=model.device) * 7)[None] % (vocabulary - 1) + 1  # 0 is padding
        own = slice(self.number * TRIED, (self.number + 1) * TRIED)
        with dividing(None):
            expected = _whole(model(input_ids=ids, use_cache=False).logits)[0, own].float()
        with self.dividing():
            positions = torch.arange(tokens, device=model.device)[None, own]
            found = _whole(model(input_ids=ids[:, own], position_ids=positions, use_cache=False).logits)[0].float()
        error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).mean().double().cpu()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        if not float(error) < TOLERANCE.get(model.dtype, EXACT):
            raise ConfigError(
                f"trainer.parallel.context = {self.size}: {type(model).__name__} computes something else from divided "
                f"sequences (relative error {float(error):.1e}){REMEDY}")


class _Total(torch.autograd.Function):
    """The sum over the group. The loss behind it is the same on all ranks and counts once: its gradient is not added up."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def groups(ranks: int, tensor: int, context: int) -> list[list[int]]:
    """Ranks that share sequences: neighbours, but those of a tensor-parallel group hold the same piece.

    8 ranks, 2 and 2 -> 0 2, 1 3, 4 6, 5 7.
    """
    block = tensor * context
    return [
        [start + i * tensor + other for i in range(context)] for start in range(0, ranks, block) for other in range(tensor)]


def share(batch: Microbatch, number: int, size: int) -> Part:
    """Part `number` of `size`: rows are padded so that all parts are equally long."""
    width = batch.inputs.shape[1]
    own = -(-width // size)
    start = number * own
    row, position = np.divmod(batch.index, width)
    at = (position >= start) & (position < start + own)
    changed: dict[str, Any] = {
        "inputs": _piece(batch.inputs, start, own, PAD_ID), "index": (row * own + position - start)[at],
        "lengths": None if batch.lengths is None else np.clip(batch.lengths - start, 0, own),
        **{name: getattr(batch, name)[:0] for name in PER_SEGMENT}}
    for name in (field.name for field in fields(batch) if field.name not in changed):
        if (value := getattr(batch, name)) is None:
            continue
        if name in PER_POSITION:
            changed[name] = _piece(value, start, own, 0)
        elif len(value) == len(at):  # what a run has no use for is empty
            changed[name] = value[at]
    return Part(replace(batch, **changed), at, torch.arange(start, start + own)[None])


def _piece(values: np.ndarray, start: int, own: int, fill: int) -> np.ndarray:
    """[R, T, ...] -> [R, t, ...], filled where T ends."""
    found = np.full((len(values), own, *values.shape[2:]), fill, values.dtype)
    piece = values[:, start : start + own]
    found[:, : piece.shape[1]] = piece
    return found


def fits(model: Any, settings: config.Parallel) -> None:
    """Raises ConfigError, with the remedy, for families whose sequences cannot be divided by heads."""
    if settings.context == 1:
        return
    shape, name = model.config.get_text_config(), type(model).__name__
    split = settings.context * settings.tensor
    heads = int(shape.num_attention_heads)
    known = {"full_attention", "sliding_attention", "chunked_attention", *(["linear_attention"] if linear(model) else [])}
    odd = sorted(set(getattr(shape, "layer_types", None) or ()) - known)
    rope = getattr(shape, "rope_parameters", None) or {}
    ropes = {str(part.get("rope_type", "")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    within, why = shape._attn_implementation, ""
    if heads % split:
        why = f"{split} (context x tensor) does not divide its {heads} attention heads; lower it"
    elif odd or (model._is_stateful and not linear(model)):
        why = f"its layers ({', '.join(odd) or 'recurrent'}) do more along a sequence than attention by heads"
    elif found := ropes & {"dynamic", "longrope"}:
        why = f"its rope_type {', '.join(found)} depends on the length of the whole sequence"
    elif not model._can_set_attn_implementation() or within not in WITHIN:
        why = f"its attention ({within}) does not go through transformers' attention interface"
    if why:
        raise ConfigError(
            f"trainer.parallel.context = {settings.context} does not fit {name}: {why}{'' if heads % split else REMEDY}")


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
