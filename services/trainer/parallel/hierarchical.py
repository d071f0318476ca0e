"""`hierarchical`: each token crosses once to each node that has one of its experts, and spreads there over the fast links.

    rank (n, l) ──rail: ranks with the same l──► (n', l) ──node n'──► (n', l')          dispatch
                ◄──────── one row a node ──────────────── sums of its ranks' rows ──    combine

Between nodes a token travels D(N) times instead of the D(R) times of `flat` (cost.py); in return every row makes two hops. The
sum over a node's ranks happens before it crosses, rounded to the dtype of the rows: this is what DeepEP calls
allow_multiple_reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist

from services.trainer.parallel.exchange import Received, check_ranks, check_tokens
from services.trainer.parallel.hops import Hop, hits, local_ids, pack, plan, unpack
from services.trainer.parallel.known_routes import Splits
from services.trainer.parallel.topology import Topology


@dataclass(frozen=True, slots=True)
class HierarchicalHandle:
    """Of one dispatch."""

    rail: Hop
    node: Hop
    idx: torch.Tensor  # int64 [R, K], local ids
    order: torch.Tensor | None  # int64 [R]: arrival -> by source rank, then token


class Hierarchical:
    """ExpertParallel over `topology.nodes` nodes of equally many ranks, on `torch.distributed`, any backend, any dtype.

    `canonical`: rows are put in the order of `flat`, so that a kernel whose result depends on the order of rows gives the same.
    """

    name = "hierarchical"
    foresees = True

    def __init__(self, topology: Topology, experts: int, *, canonical: bool = False) -> None:
        self.group, self.experts, self._topology = topology.group, experts, topology
        self._local, self._canonical = check_ranks(experts, topology.group), canonical
        self._rank = dist.get_rank(topology.group)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: HierarchicalHandle | None = None, splits: Splits | None = None,
    ) -> Received:
        if handle is not None:
            return Received(_ordered(handle.node.out(handle.rail.out(x)), handle.order), handle.idx, None, handle)
        check_tokens(x, topk_idx, topk_weights, self.experts)
        assert topk_idx is not None and topk_weights is not None
        topology, local = self._topology, self._local
        rail = plan(hits(topk_idx, local * topology.width, topology.nodes), topology.rail, splits and splits.rail(self._rank))
        fields = [x, topk_weights, topk_idx.to(torch.int16)]
        relayed = rail.out(pack(fields))
        ids = unpack(relayed, fields)[2].long()
        first = topology.node_index * topology.width * local  # of this node's experts
        here = torch.where((ids >= first) & (ids < first + topology.width * local), ids - first, -1)
        node = plan(hits(here, local, topology.width), topology.node, splits and splits.node(self._rank))
        order = self._order(rail, node) if self._canonical else None
        rows, weights, ids = unpack(_ordered(node.out(relayed), order), fields)
        idx = local_ids(ids.long(), self._rank, local)
        return Received(rows, idx, weights, HierarchicalHandle(rail, node, idx, order))

    def combine(
        self, rows: torch.Tensor, handle: HierarchicalHandle, weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        fields = [rows] if weights is None else [rows, weights.masked_fill(handle.idx < 0, 0)]
        packed = pack(fields)
        if handle.order is not None:
            packed = torch.empty_like(packed).index_copy_(0, handle.order, packed)
        sums = [handle.node.sums(field) for field in unpack(handle.node.back(packed), fields)]
        found = [handle.rail.sums(field) for field in unpack(handle.rail.back(pack(sums)), sums)]
        return found[0], found[1] if weights is not None else None

    def rounds(self, tokens: int) -> int:
        return 1

    def close(self) -> None:
        """Nothing is held."""

    def _order(self, rail: Hop, node: Hop) -> torch.Tensor:
        """Arrival -> by source rank: each relay tells which source each of its rows came from. Collective."""
        width = self._topology.width
        device = node.index.device
        sources = torch.arange(self._topology.nodes, device=device) * width + dist.get_rank(self._topology.node)
        relayed = sources.repeat_interleave(torch.tensor(rail.received, device=device))
        return torch.argsort(node.out(relayed[:, None])[:, 0], stable=True)


def _ordered(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return rows if order is None else rows.index_select(0, order)
