"""What the exchanges are compared with, and transformers' stock pattern among them: for benchmarks, and where they do win.

`copy`: one row for each (token, expert), as stock all_to_all sends them. `all_gather`: every token to every rank, results by
reduce-scatter; with K of E experts per token on W ranks a token hits most ranks anyway as soon as K ≥ W, and then one ring is
cheaper than a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from services.trainer.parallel.exchange import Received, check_ranks, check_tokens
from services.trainer.parallel.flat import Flat, FlatHandle
from services.trainer.parallel.hops import local_ids, pack, unpack

# Renamed in torch 2.13, which warns of the former names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Copies:
    """`flat` without de-duplication: rows received have one lane (K = 1)."""

    name = "copy"

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self._flat = Flat(group, experts)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: tuple[FlatHandle, int] | None = None,
    ) -> Received:
        if handle is not None:
            inner = self._flat.dispatch(x.repeat_interleave(handle[1], 0), handle=handle[0])
            return Received(inner.rows, inner.idx, None, handle)
        check_tokens(x, topk_idx, topk_weights, self.experts)
        assert topk_idx is not None and topk_weights is not None
        lanes = topk_idx.shape[1]
        inner = self._flat.dispatch(x.repeat_interleave(lanes, 0), topk_idx.reshape(-1, 1), topk_weights.reshape(-1, 1))
        return Received(inner.rows, inner.idx, inner.weights, (inner.handle, lanes))

    def combine(
        self, rows: torch.Tensor, handle: tuple[FlatHandle, int], weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat, lanes = handle
        out, back = self._flat.combine(rows, flat, weights)
        summed = out.reshape(out.shape[0] // lanes, lanes, out.shape[1]).sum(1)
        return summed, None if back is None else back.reshape(-1, lanes)

    def rounds(self, tokens: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class GatheredHandle:
    """Of one dispatch."""

    counts: list[int]  # tokens of each rank
    idx: torch.Tensor


class AllGather:
    """Every rank gets every token; those of no local expert come with -1 in all lanes. Ranks are padded to the longest."""

    name = "all_gather"

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self._local = check_ranks(experts, group)
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: GatheredHandle | None = None,
    ) -> Received:
        if handle is not None:
            return Received(unpack(self._gather(pack([x]), handle.counts), [x])[0], handle.idx, None, handle)
        check_tokens(x, topk_idx, topk_weights, self.experts)
        assert topk_idx is not None and topk_weights is not None
        counts = torch.empty(self._ranks, dtype=torch.int64, device=x.device)
        _all_gather(counts, torch.tensor([len(x)], device=x.device), group=self.group)
        fields = [x, topk_weights, topk_idx.to(torch.int16)]
        tokens = counts.tolist()
        rows, weights, ids = unpack(self._gather(pack(fields), tokens), fields)
        idx = local_ids(ids.long(), self._rank, self._local)
        return Received(rows, idx, weights, GatheredHandle(tokens, idx))

    def combine(
        self, rows: torch.Tensor, handle: GatheredHandle, weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if weights is None:
            return self._reduce(rows, handle.counts), None
        return self._reduce(rows, handle.counts), self._reduce(weights.masked_fill(handle.idx < 0, 0), handle.counts)

    def rounds(self, tokens: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing is held."""

    def _gather(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        longest = max(counts)
        found = rows.new_empty((self._ranks, longest, rows.shape[1]))
        padded = torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows)))
        _all_gather(found.reshape(-1, rows.shape[1]), padded, group=self.group)
        return torch.cat([found[i, :count] for i, count in enumerate(counts)])

    def _reduce(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        longest = max(counts)
        padded = torch.cat([
            torch.nn.functional.pad(part, (0, 0, 0, longest - len(part))) for part in rows.split(counts)])
        found = rows.new_empty((longest, rows.shape[1]))
        _reduce_scatter(found, padded, group=self.group)
        return found[: counts[self._rank]]
