"""What the library demands of a call: a failed demand raises AssertionError with the name of the argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist


def tokens(x: torch.Tensor, most: int, hidden: int) -> None:
    """Of dispatch."""
    assert isinstance(x, torch.Tensor), "x: a tuple is for FP8"
    assert x.ndim == 2 and x.is_contiguous(), "x: 2-D and contiguous"
    assert x.dtype == torch.bfloat16, f"x: {x.dtype} is not bfloat16"
    assert x.shape[1] * x.element_size() % 16 == 0 and x.shape[1] <= hidden, "x: row bytes % 16, and within the buffer"
    assert len(x) <= most, f"x: {len(x)} tokens exceed num_max_tokens_per_rank = {most}"
    assert len(x) > 0, "x: no token; whether the library stands that is unproven, so nobody may rely on it"


def routes(idx: torch.Tensor, rows: int, experts: int) -> None:
    """topk_idx of a fresh dispatch."""
    assert idx.dtype == torch.int64 and idx.is_contiguous() and idx.ndim == 2 and len(idx) == rows, "topk_idx"
    assert idx.shape[1] <= 32, "topk_idx: more than 32 experts a token"
    assert not len(idx) or -1 <= int(idx.min()) <= int(idx.max()) < experts, "topk_idx: an id out of range"
    for token in idx.tolist():
        chosen = [e for e in token if e >= 0]
        assert len(set(chosen)) == len(chosen), f"topk_idx: {token} names an expert twice"


def weights(given: torch.Tensor | None, rows: int, lanes: int, what: str) -> None:
    """Routing weights, or their gradients."""
    if given is not None:
        assert given.dtype == torch.float32, f"{what}: {given.dtype} is not float32"
        assert given.is_contiguous() and given.shape == (rows, lanes), f"{what}: contiguous [{rows}, {lanes}]"


def world(group: dist.ProcessGroup, experts: int, hybrid: bool, nvlink: int) -> None:
    """Of the group and the experts."""
    ranks = dist.get_world_size(group)
    assert experts % ranks == 0 and experts <= 2048 and experts // ranks <= 256 and ranks <= 1024, "num_experts"
    if hybrid:
        width = min(nvlink, ranks)
        assert ranks // width <= 32 and width <= 64, "hybrid: nodes or NVLink ranks"
        assert width + experts // ranks <= 128, "Insufficient notify threads"


def same(group: dist.ProcessGroup, call: tuple[Any, ...]) -> None:
    """Every rank makes the same call; the library would wait 100 s for a rank that makes another."""
    calls: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(calls, call, group=group)
    assert len(set(calls)) == 1, f"collective mismatch: {calls}"


def events(previous: Any, on_comm_stream: bool) -> None:
    """Of any call."""
    assert previous is None or on_comm_stream, "previous_event needs allocate_on_comm_stream"
