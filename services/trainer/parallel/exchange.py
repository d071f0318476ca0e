"""The seam of expert parallelism: dispatch tokens to the ranks of their experts, combine the results, with gradients.

Axes: T tokens of this rank, K experts per token, H hidden, R rows received, E experts of all ranks, e = E / ranks of each.

    x[T, H], topk_idx[T, K] global ids, -1 = no expert     rows[R, H], idx[R, K] local ids, -1 = not here, weights[R, K]
              │                                                                    ▲
              └──────────────────────────── dispatch ──────────────────────────────┘
    out[T, H] = sum over the ranks that t went to          y[R, H] = sum over local experts of weight · expert(row)
              ▲                                                                    │
              └──────────────────────────── combine ───────────────────────────────┘

Weights are applied where the expert is, before combine: only then may a node add up its results before they cross to another.
Backward of dispatch is combine (with the gradients of the weights), and backward of combine is dispatch, both with the handle
of the forward pass: rows arrive in the same order, and nothing is counted or negotiated again. This is DeepEP's shape.

Every call is collective: ranks without tokens take part with T = 0, ranks without rows with R = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import distributed as dist

from slipstream.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Received:
    """What dispatch brought to this rank."""

    rows: torch.Tensor  # [R, H] as x
    idx: torch.Tensor  # int64 [R, K]: experts of this rank, 0..e-1; -1 = an expert elsewhere, or none
    weights: torch.Tensor | None  # [R, K] as sent; lanes with idx -1 hold weights of other ranks' experts; None if cached
    handle: Any  # opaque; good for any number of calls in both directions


class ExpertParallel(Protocol):
    """A way to exchange tokens. Contract: tests/parallel/test_exchange.py, which runs on every implementation."""

    name: str
    group: dist.ProcessGroup
    experts: int  # of all ranks

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: Any = None,
    ) -> Received:
        """Send each token once to each rank that has one of its experts.

        Give either topk_idx and topk_weights, or the handle of an earlier dispatch: then x goes the same way, into the same
        order of rows. Raises InvalidInput for shapes, dtypes or expert ids that do not fit.
        """
        ...

    def combine(
        self, rows: torch.Tensor, handle: Any, weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(sum of each token's rows [T, H], and of `weights` [R, K] the lanes of the ranks that own them, as [T, K])."""
        ...

    def rounds(self, tokens: int) -> int:
        """Into how many parts to cut `tokens`, the same number on all ranks: 1, unless a buffer limits a part. Collective."""
        ...

    def close(self) -> None:
        """Give back buffers. Collective; the process groups are the caller's."""
        ...


def dispatch(
    exchange: ExpertParallel, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, splits: Any = None,
) -> Received:
    """`exchange.dispatch` with gradients for x and topk_weights. Weights of experts elsewhere are zero.

    `splits`: see known_routes.py; on all ranks or on none, and only for an exchange that `foresees`.
    """
    rows, idx, weights, handle = _Dispatch.apply(exchange, x, topk_idx, topk_weights, splits)  # pyright: ignore
    return Received(rows, idx, weights.masked_fill(idx < 0, 0.0), handle)


def combine(exchange: ExpertParallel, rows: torch.Tensor, handle: Any) -> torch.Tensor:
    """`exchange.combine` with a gradient for rows: [R, H] -> [T, H]."""
    return _Combine.apply(exchange, rows, handle)  # pyright: ignore


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Any, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, splits: Any,
    ) -> Any:
        known = {} if splits is None else {"splits": splits}
        received = exchange.dispatch(x, topk_idx, topk_weights, **known)
        ctx.exchange, ctx.handle = exchange, received.handle
        ctx.dtypes = x.dtype, topk_weights.dtype
        ctx.mark_non_differentiable(received.idx)
        return received.rows, received.idx, received.weights, received.handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_rows, _, grad_weights, _ = grads
        grad_x, grad_topk = ctx.exchange.combine(grad_rows, ctx.handle, grad_weights)
        return None, grad_x.to(ctx.dtypes[0]), None, grad_topk.to(ctx.dtypes[1]), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: ExpertParallel, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        ctx.exchange, ctx.handle, ctx.dtype = exchange, handle, rows.dtype
        return exchange.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, ctx.exchange.dispatch(grads[0], handle=ctx.handle).rows.to(ctx.dtype), None


def check_tokens(x: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, experts: int) -> None:
    """What every implementation asks of its arguments. Raises InvalidInput."""
    if topk_idx is None or topk_weights is None:
        raise InvalidInput("dispatch needs topk_idx and topk_weights, or the handle of an earlier one", "TOPK")
    if x.ndim != 2 or topk_idx.ndim != 2 or topk_idx.shape != topk_weights.shape or len(topk_idx) != len(x):
        raise InvalidInput(
            f"x {list(x.shape)}, topk_idx {list(topk_idx.shape)}, topk_weights {list(topk_weights.shape)}: need [T, H], "
            "[T, K], [T, K]", "SHAPE")
    if topk_idx.dtype != torch.int64 or not topk_weights.is_floating_point():
        raise InvalidInput(f"topk_idx is {topk_idx.dtype}, topk_weights {topk_weights.dtype}: need int64 and floats", "DTYPE")
    if topk_idx.numel() and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < experts:
        raise InvalidInput(
            f"topk_idx has ids from {int(topk_idx.min())} to {int(topk_idx.max())}; need -1..{experts - 1}", "EXPERT_ID")


def check_ranks(experts: int, group: dist.ProcessGroup) -> int:
    """Experts of one rank. Raises InvalidInput when they do not divide."""
    ranks = dist.get_world_size(group)
    if experts % ranks:
        raise InvalidInput(
            f"{experts} experts on {ranks} ranks: the number of experts must be a multiple of the ranks; choose another "
            "trainer.parallel.experts", "EXPERTS")
    return experts // ranks
