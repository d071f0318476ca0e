"""What every ExpertParallel must do, run on the ranks of a world: integer arithmetic, so equality is exact in any order.

Each check returns "" or what was wrong. An expert here multiplies its rows by a whole number; with small integers for tokens
and gradients and powers of two for weights, every sum is exact in bfloat16, float32 and float64 alike, and the reference in
float64 is the only right answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from services.trainer.parallel.exchange import ExpertParallel, combine, dispatch

CASES = ("random", "skewed", "empty_rank", "zero_tokens", "one_expert", "masked", "uneven")


@dataclass(frozen=True)
class Shape:
    """Of the layer under test."""

    experts: int = 8
    top_k: int = 3
    hidden: int = 16
    dtype: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass(frozen=True)
class Inputs:
    """One rank's."""

    x: torch.Tensor  # [T, H]
    idx: torch.Tensor  # [T, K]
    weights: torch.Tensor  # [T, K]
    grad: torch.Tensor  # [T, H]


def inputs(case: str, rank: int, ranks: int, shape: Shape, integers: bool = True) -> Inputs:
    """A pure function of its arguments, so that each rank knows what the others have. No tensor is contiguous."""
    random = np.random.default_rng([CASES.index(case), rank, ranks])
    tokens = {"empty_rank": 0 if rank == ranks - 1 else 9, "zero_tokens": 0, "uneven": 1 + 7 * rank}.get(case, 10)
    E, K, H = shape.experts, shape.top_k, shape.hidden
    idx = np.array([random.permutation(E)[:K] for _ in range(tokens)], np.int64).reshape(tokens, K)
    if case == "skewed":
        idx = np.array([random.permutation(3)[:K] for _ in range(tokens)], np.int64).reshape(tokens, K)
    if case == "one_expert":
        idx[:, 0], idx[:, 1:] = E - 1, -1
    if case == "masked":
        idx[random.random((tokens, K)) < 0.5] = -1
        idx[0] = -1
    if integers:
        x, grad = random.integers(-2, 3, (tokens, H)), random.integers(-1, 2, (tokens, H))
        weights = random.choice([0.5, 1.0, 2.0], (tokens, K))
    else:
        x, grad, weights = random.normal(size=(tokens, H)), random.normal(size=(tokens, H)), random.random((tokens, K))
    return Inputs(
        strided(x, shape.dtype, shape), strided(idx, torch.int64, shape), strided(weights, shape.weights, shape),
        strided(grad, shape.dtype, shape))


def strided(values: np.ndarray, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    """As a transposed tensor: what needs contiguous memory must see to it."""
    return torch.tensor(values, dtype=dtype, device=shape.device).t().contiguous().t()


def scales(shape: Shape) -> torch.Tensor:
    """[E]: what each expert multiplies by."""
    return torch.arange(shape.experts, dtype=torch.float64, device=shape.device) % 3 + 1


def expert(rows: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, scale_e: torch.Tensor) -> torch.Tensor:
    """Weighted sum over local experts, in float64 inside and back in the dtype of the rows: [R, H]."""
    chosen = torch.where(idx < 0, 0.0, scale_e[idx.clamp(min=0)] * weights.double())
    return (rows.double() * chosen.sum(1, keepdim=True)).to(rows.dtype)


@dataclass(frozen=True)
class Found:
    """Of one block, forward and backward."""

    out: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    ds: torch.Tensor  # [e]


def block(exchange: ExpertParallel, given: Inputs, shape: Shape, recompute: bool = False) -> Found:
    """dispatch → experts → combine, then backward with `given.grad`."""
    rank, local = dist.get_rank(exchange.group), shape.experts // dist.get_world_size(exchange.group)
    scale_e = scales(shape)[rank * local : (rank + 1) * local].requires_grad_()
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = dispatch(exchange, x, given.idx, weights)
        assert received.weights is not None and not received.weights[received.idx < 0].any(), "a weight of an expert elsewhere"
        return combine(exchange, expert(received.rows, received.idx, received.weights, scale_e), received.handle)

    out = checkpoint(layer, x, weights, use_reentrant=False) if recompute else layer(x, weights)
    assert isinstance(out, torch.Tensor) and x.grad is None
    out.backward(given.grad)
    assert x.grad is not None and weights.grad is not None
    return Found(out.detach(), x.grad, weights.grad, torch.zeros_like(scale_e) if scale_e.grad is None else scale_e.grad)


def reference(case: str, rank: int, ranks: int, shape: Shape) -> Found:
    """In float64, with all experts at hand."""
    scale_E = scales(shape)
    ds = torch.zeros_like(scale_E)
    own: Found | None = None
    for source in range(ranks):
        given = inputs(case, source, ranks, shape)
        x, weights, grad = given.x.double(), given.weights.double(), given.grad.double()
        valid = given.idx >= 0
        chosen = torch.where(valid, scale_E[given.idx.clamp(min=0)], 0.0)
        factor = (chosen * weights).sum(1, keepdim=True)
        inner = (x * grad).sum(1, keepdim=True)
        ds.index_add_(0, given.idx[valid], (weights * inner)[valid])
        if source == rank:
            own = Found(x * factor, grad * factor, chosen * inner, ds)
    assert own is not None
    local = shape.experts // ranks
    return Found(own.out, own.dx, own.dw, ds[rank * local : (rank + 1) * local])


def differs(found: Found, right: Found, shape: Shape) -> str:
    """The first of the four that is not the reference, bit for bit."""
    for name, dtype in (("out", shape.dtype), ("dx", shape.dtype), ("dw", shape.weights), ("ds", torch.float64)):
        one, other = getattr(found, name), getattr(right, name)
        if one.shape != other.shape:
            return f"{name} has shape {list(one.shape)} instead of {list(other.shape)}"
        if one.dtype != dtype and name != "ds":
            return f"{name} is {one.dtype} instead of {dtype}"
        if not torch.equal(one.double(), other):
            return f"{name} differs in {int((one.double() != other).sum())} of {one.numel()} elements"
    return ""


def exact(exchange: ExpertParallel, case: str, shape: Shape, recompute: bool = False) -> str:
    """Output and the gradients of tokens, weights and experts are those of the dense reference."""
    rank, ranks = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
    found = block(exchange, inputs(case, rank, ranks, shape), shape, recompute)
    return differs(found, reference(case, rank, ranks, shape), shape)


def adjoint(exchange: ExpertParallel, case: str, shape: Shape) -> str:
    """<dispatch x, y> = <x, combine y> over all ranks, for any y: what makes each the backward of the other."""
    rank, ranks = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
    given = inputs(case, rank, ranks, shape)
    received = exchange.dispatch(given.x, given.idx, given.weights)
    y = strided(np.random.default_rng(rank).integers(-2, 3, received.rows.shape), shape.dtype, shape)
    back, _ = exchange.combine(y, received.handle)
    sides = torch.stack([(received.rows.double() * y.double()).sum(), (given.x.double() * back.double()).sum()])
    dist.all_reduce(sides, group=exchange.group)
    return "" if sides[0] == sides[1] else f"{sides[0]} is not {sides[1]}"


def reuse(exchange: ExpertParallel, case: str, shape: Shape) -> str:
    """Two handles in flight, used out of turn and twice: rows come in the same order, whatever became of the inputs since."""
    rank, ranks = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
    first, second = inputs(case, rank, ranks, shape), inputs("random", rank, ranks, shape)
    one, two = (exchange.dispatch(g.x, g.idx.clone(), g.weights) for g in (first, second))
    changed = first.idx.clone()
    three = exchange.dispatch(first.x, changed, first.weights)
    changed.fill_(0)
    wrong = []
    for given, received in ((first, one), (second, two), (first, one), (first, three)):
        again = exchange.dispatch(given.x, handle=received.handle)
        if not torch.equal(again.rows, received.rows) or not torch.equal(again.idx, received.idx):
            wrong.append("a cached dispatch brought other rows")
        sums, lanes = exchange.combine(again.rows, received.handle, received.weights)  # with those of experts elsewhere
        if lanes is None or not torch.equal(lanes.double(), given.weights.double().masked_fill(given.idx < 0, 0)):
            wrong.append("weights did not come back from the ranks that own their experts")
        copies = torch.stack([
            ((given.idx * ranks).div(shape.experts, rounding_mode="floor") == r).logical_and(given.idx >= 0).any(1)
            for r in range(ranks)]).sum(0)
        if not torch.equal(sums.double(), given.x.double() * copies[:, None]):
            wrong.append("combine of what was sent is not each token times the ranks that it went to")
    return "; ".join(wrong)  # at the end: a rank that left earlier would leave the others in a collective


def chunked(exchange: ExpertParallel, shape: Shape, most: int) -> str:
    """Inputs of very different lengths, none in one part longer than a buffer of `most`: as many parts on every rank."""
    rank, ranks = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
    given = inputs("uneven", rank, ranks, shape)
    rounds = exchange.rounds(len(given.x))
    parts = zip(*(value.tensor_split(rounds) for value in (given.x, given.idx, given.weights, given.grad)), strict=True)
    found = [block(exchange, Inputs(*part), shape) for part in parts]
    right = reference("uneven", rank, ranks, shape)
    whole = Found(
        *(torch.cat([getattr(f, name) for f in found]) for name in ("out", "dx", "dw")),
        torch.stack([f.ds for f in found]).sum(0))
    return differs(whole, right, shape) or ("" if rounds == -(-(1 + 7 * (ranks - 1)) // most) else f"{rounds} rounds")


def repeats(exchange: ExpertParallel, shape: Shape) -> str:
    """The same call gives the same bits, on ordinary numbers."""
    rank, ranks = dist.get_rank(exchange.group), dist.get_world_size(exchange.group)
    given = inputs("random", rank, ranks, shape, integers=False)
    one, other = block(exchange, given, shape), block(exchange, given, shape)
    same = all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("out", "dx", "dw", "ds"))
    return "" if same else "a repetition gave other bits"


def suite(exchange: ExpertParallel, shape: Shape, deduplicated: bool = True) -> dict[str, str]:
    """Every check of the contract, by name. Without de-duplication a token's copies are not one a rank."""
    found = {}
    for case in CASES:
        found[f"exact {case}"] = exact(exchange, case, shape)
        found[f"adjoint {case}"] = adjoint(exchange, case, shape)
        if deduplicated:
            found[f"reuse {case}"] = reuse(exchange, case, shape)
    found["exact recomputed"] = exact(exchange, "random", shape, recompute=True)
    return found
