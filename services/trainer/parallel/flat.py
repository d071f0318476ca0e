"""`flat`: one all-to-all over all ranks; each token crosses once to each rank that has one of its experts.

Bytes grow with the number of ranks that a token hits, see cost.py. On one node, or when links between nodes are about as
fast as those within, this is the one to use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist

from services.trainer.parallel.exchange import Received, check_ranks, check_tokens
from services.trainer.parallel.hops import Hop, hits, local_ids, pack, plan, unpack
from services.trainer.parallel.known_routes import Splits


@dataclass(frozen=True, slots=True)
class FlatHandle:
    """Of one dispatch."""

    hop: Hop
    idx: torch.Tensor  # int64 [R, K], local ids


class Flat:
    """ExpertParallel on `torch.distributed`, any backend, any dtype. Rows arrive by source rank, then token.

    `nodes` > 1: sums go in the order of `hierarchical`, experts → ranks of a node → nodes, so that the results of the two are
    equal bit for bit.
    """

    name = "flat"
    foresees = True

    def __init__(self, group: dist.ProcessGroup, experts: int, *, nodes: int = 1) -> None:
        self.group, self.experts = group, experts
        self._local, self._nodes = check_ranks(experts, group), nodes
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: FlatHandle | None = None, splits: Splits | None = None,
    ) -> Received:
        if handle is not None:
            return Received(handle.hop.out(x), handle.idx, None, handle)
        check_tokens(x, topk_idx, topk_weights, self.experts)
        assert topk_idx is not None and topk_weights is not None
        hop = plan(hits(topk_idx, self._local, self._ranks), self.group, splits and splits.direct(self._rank))
        fields = [x, topk_weights, topk_idx.to(torch.int16)]
        rows, weights, ids = unpack(hop.out(pack(fields)), fields)
        idx = local_ids(ids.long(), self._rank, self._local)
        return Received(rows, idx, weights, FlatHandle(hop, idx))

    def combine(
        self, rows: torch.Tensor, handle: FlatHandle, weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fields = [rows] if weights is None else [rows, weights.masked_fill(handle.idx < 0, 0)]
        came = unpack(handle.hop.back(pack(fields)), fields)
        found = [handle.hop.sums(field, self._nodes) for field in came]
        return found[0], found[1] if weights is not None else None

    def rounds(self, tokens: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing is held."""
