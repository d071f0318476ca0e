"""Counts of every exchange of a step, known before it: where all routes are recorded, nobody asks how many rows will come.

    routes of a rank's micro-batches ──counts──► [B, L, W + M] ──one all-gather a step──► of all ranks ──Splits──► each dispatch

An exchange has to know how many rows it gets from whom. Without routes the ranks tell each other in every layer, in a
collective of its own, and in another one for the second hop. With the sampler's routes (R3), or the trainer's of an earlier
pass, every rank counts on its host, and the counts of a step travel once. What an exchange sends, and in which order, is the
same to the bit.

Padding has no recorded routes, and nobody looks at what its experts say: in a micro-batch with known routes it has no expert. A
micro-batch in which a token has none, on any rank of an expert group, is exchanged as ever.

Axes: B micro-batches, L layers, N tokens of a micro-batch with padding, K experts per token, W ranks of an expert group, M
nodes.

Worked example: 4 experts on 4 ranks of 2 nodes, a layer, tokens with experts {0, 1} and {1, 3}. They need rank 0 once, rank 1
twice, rank 3 once; node 0 twice and node 1 once: counts 1 2 0 1, 2 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from services.trainer.packing import Microbatch

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Splits:
    """Of one exchange: what every rank of the group wants of every other."""

    ranks_W_W: np.ndarray  # int: tokens of the first rank that have an expert on the second
    nodes_W_M: np.ndarray  # int: tokens of the rank that have an expert on the node

    def direct(self, rank: int) -> tuple[list[int], list[int]]:
        """(sent, received) of one hop between all ranks."""
        return self.ranks_W_W[rank].tolist(), self.ranks_W_W[:, rank].tolist()

    def rail(self, rank: int) -> tuple[list[int], list[int]]:
        """(sent, received) of the hop between the ranks with this rank's place on their nodes."""
        node, place = divmod(rank, self.width)
        return self.nodes_W_M[rank].tolist(), self.nodes_W_M[place :: self.width, node].tolist()

    def node(self, rank: int) -> tuple[list[int], list[int]]:
        """(sent, received) of the hop within this rank's node, of what came over the rails."""
        node, place = divmod(rank, self.width)
        own = slice(node * self.width, (node + 1) * self.width)
        by_place = self.ranks_W_W.reshape(-1, self.width, len(self.ranks_W_W)).sum(0)  # [place of the source, destination]
        return by_place[place, own].tolist(), by_place[:, rank].tolist()

    @property
    def width(self) -> int:
        """Ranks of a node."""
        return len(self.ranks_W_W) // self.nodes_W_M.shape[1]


def real(batch: Microbatch) -> np.ndarray:
    """bool [N]: where a micro-batch has tokens and no padding."""
    rows, width = batch.inputs.shape
    lengths_R = np.full(rows, width) if batch.lengths is None else batch.lengths
    return (np.arange(width) < lengths_R[:, None]).reshape(rows * width)


def known(batch: Microbatch) -> bool:
    """Whether every token of a micro-batch has recorded routes; one without tokens needs none."""
    tokens_N = real(batch)
    return not tokens_N.any() or (batch.routed is not None and bool(batch.routed.reshape(-1)[tokens_N].all()))


def counts(
    batch: Microbatch, layers: int, experts: int, ranks: int, nodes: int, tensor: tuple[int, int] = (0, 1),
) -> np.ndarray:
    """Tokens that have an expert on each rank, and on each node: int32 [L, W + M]; all UNKNOWN for one that is not `known`.

    `tensor`: (number, size) of this rank in a tensor-parallel group, which exchanges a slice of the tokens, cut as torch.chunk
    cuts.
    """
    if not known(batch):
        return np.full((layers, ranks + nodes), UNKNOWN, np.int32)
    tokens_N = real(batch)
    if batch.routes is None or not tokens_N.any():
        return np.zeros((layers, ranks + nodes), np.int32)
    size = -(-len(tokens_N) // tensor[1])
    own = np.zeros(len(tokens_N), bool)
    own[tensor[0] * size : (tensor[0] + 1) * size] = True
    routes_N_L_K = batch.routes.reshape(len(tokens_N), *batch.routes.shape[2:])
    return counted(routes_N_L_K[tokens_N & own], experts, ranks, nodes)


def counted(routes_N_L_K: np.ndarray, experts: int, ranks: int, nodes: int) -> np.ndarray:
    """The same of tokens that all have routes. Experts are on ranks in blocks, ranks on nodes likewise."""
    found = np.zeros((routes_N_L_K.shape[1], ranks + nodes), np.int32)
    for layer in range(len(found)):
        for start, parts in ((0, ranks), (ranks, nodes)):
            wanted = np.zeros((len(routes_N_L_K), parts), bool)
            np.put_along_axis(wanted, routes_N_L_K[:, layer].astype(np.int64) // (experts // parts), True, 1)
            found[layer, start : start + parts] = wanted.sum(0)
    return found


class KnownRoutes:
    """What is known of the step that runs. One for each model; its experts look here."""

    def __init__(self) -> None:
        self._members: list[int] = []
        self._tensor, self._experts = (0, 1), 0
        self._order: dict[int, int] = {}  # id of an experts module -> its layer
        self._splits: list[list[Splits] | None] = []
        self._tokens: list[np.ndarray] = []
        self._now: int | None = None

    def spread(self, experts: int, group: dist.ProcessGroup, tensor: tuple[int, int]) -> None:
        """`experts` of each layer are on the ranks of `group`; `tensor` as in `counts`."""
        self._experts, self._members, self._tensor = experts, dist.get_process_group_ranks(group), tensor

    def foresee(self, layers: Sequence[Any], batches: Sequence[Microbatch], width: int) -> int:
        """Before a step on `batches`, parts of this rank, as many on each: how many of them need no counts exchanged.

        `layers`: experts modules in the order of recorded routes; `width` ranks are on a node. Collective over all ranks.
        """
        self.forget()
        self._order = {id(module): number for number, module in enumerate(layers)}
        ranks = len(self._members)
        nodes = ranks // min(width, ranks)
        mine = np.stack([counts(b, len(layers), self._experts, ranks, nodes, self._tensor) for b in batches])
        gathered = [torch.empty(mine.shape, dtype=torch.int32) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.from_numpy(mine))
        group_B_L_W_C = np.stack([gathered[rank].numpy() for rank in self._members], 2)
        for batch, found_L_W_C in zip(batches, group_B_L_W_C, strict=True):
            there = bool((found_L_W_C != UNKNOWN).all())
            self._splits.append([Splits(c[:, :ranks], c[:, ranks:]) for c in found_L_W_C] if there else None)
            self._tokens.append(real(batch))
        return sum(splits is not None for splits in self._splits)

    def forget(self) -> None:
        """Nothing is known of what comes."""
        self._splits, self._tokens, self._now = [], [], None

    @contextlib.contextmanager
    def during(self, number: int | None) -> Iterator[None]:
        """Passes of micro-batch `number` of the step, with its routes, belong inside; None: passes of anything else."""
        before, self._now = self._now, number
        try:
            yield
        finally:
            self._now = before

    def of(self, module: Any) -> tuple[Splits, np.ndarray] | None:
        """Splits of the exchange that this experts module makes now, and where there are tokens, [N]; None: not known."""
        if self._now is None or self._now >= len(self._splits) or (splits := self._splits[self._now]) is None:
            return None
        return splits[self._order[id(module)]], self._tokens[self._now]
