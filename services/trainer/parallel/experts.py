"""Our exchanges in transformers' registry: any family whose experts use its interface runs with them.

transformers builds one `EPImplementation` for each experts module and calls it with this rank's tokens, global expert ids and
routing weights; `experts_forward` runs the local experts on whatever rows it is given, skipping id `num_local_experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from services.trainer.parallel import exchange as seam
from services.trainer.parallel.exchange import ExpertParallel
from services.trainer.parallel.known_routes import KnownRoutes, Splits

# (group of the experts' ranks, number of experts, hidden size, dtype) -> an exchange
Make = Callable[[dist.ProcessGroup, int, int, torch.dtype], ExpertParallel]


class Exchanges:
    """One exchange for each expert group and shape, shared by the layers: buffers are large and communicators few."""

    def __init__(self, make: Make) -> None:
        self._make, self.known = make, KnownRoutes()
        self._made: dict[Any, ExpertParallel] = {}

    def of(self, group: dist.ProcessGroup, experts: int, hidden: int, dtype: torch.dtype) -> ExpertParallel:
        """Collective when it is new."""
        key = (tuple(dist.get_process_group_ranks(group)), experts, hidden, dtype)
        if key not in self._made:
            self._made[key] = self._make(group, experts, hidden, dtype)
        return self._made[key]

    @property
    def foresee(self) -> bool:
        """Whether those that were made can do without counts."""
        return bool(self._made) and all(getattr(made, "foresees", False) for made in self._made.values())

    def close(self) -> None:
        """Close them all. Collective."""
        for made in self._made.values():
            made.close()
        self._made.clear()


class ExchangedExperts(EPImplementation):
    """Experts behind an `ExpertParallel`. Ranks of a tensor-parallel group hold the same tokens and exchange a slice each."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any, exchanges: Exchanges) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._exchanges, self._local, self._experts = exchanges, int(experts.num_experts), experts
        exchanges.known.spread(self._local * ep_mesh.size(), ep_mesh.get_group(), (tp_mesh.get_local_rank(), tp_mesh.size()))
        experts.experts_of_all_ranks = self._local * ep_mesh.size()  # see services.trainer.expert_load.number_of

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        tokens, sliced = len(hidden_states), self.tp_mesh.size() > 1
        splits: Splits | None = None
        if (foreseen := self._exchanges.known.of(self._experts)) is not None:
            splits, there_N = foreseen
            top_k_index = top_k_index.masked_fill(~torch.from_numpy(there_N).to(top_k_index.device)[:, None], -1)
        x, idx, weights = (
            _slice(value, self.tp_mesh) if sliced else value for value in (hidden_states, top_k_index, top_k_weights))
        exchange = self._exchanges.of(
            self.ep_mesh.get_group(), self._local * self.ep_mesh.size(), hidden_states.shape[1], hidden_states.dtype)
        rounds = 1 if splits is not None else exchange.rounds(len(x))
        parts = zip(*(value.tensor_split(rounds) for value in (x, idx, weights)), strict=True)
        out = torch.cat([self._round(exchange, *part) for part in parts]) if rounds > 1 else self._round(
            exchange, x, idx, weights, splits)
        return _joined(out, tokens, self.tp_mesh) if sliced else out

    def _round(
        self, exchange: ExpertParallel, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor,
        splits: Splits | None = None,
    ) -> torch.Tensor:
        received = seam.dispatch(exchange, x, topk_idx.long(), topk_weights, splits)
        assert received.weights is not None
        if len(received.rows):
            idx = torch.where(received.idx < 0, self._local, received.idx)
            rows = self.experts_forward(received.rows, idx, received.weights)
        else:  # one row of zeros, dropped again: backward must pass here, since its exchange is collective
            zero = received.weights.sum().reshape(1, 1)
            rows = self.experts_forward(received.rows.sum(0, keepdim=True), torch.zeros_like(zero, dtype=torch.int64), zero)[:0]
        return seam.combine(exchange, rows, received.handle)


def register(name: str, exchanges: Exchanges) -> None:
    """Let `DistributedConfig(ep_implementation=name)` use these exchanges."""
    def build(experts: Any, ep_mesh: Any, tp_mesh: Any) -> ExchangedExperts:
        return ExchangedExperts(experts, ep_mesh, tp_mesh, exchanges)

    EPImplementationInterface.register(name, build)


def _slice(value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """This rank's rows of what all ranks of the mesh hold; the gradient is gathered back."""
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


def _joined(rows: torch.Tensor, tokens: int, mesh: Any) -> torch.Tensor:
    """The inverse of `_slice`."""
    whole = torch.Size((tokens, rows.shape[1]))
    return DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], shape=whole, stride=(rows.shape[1], 1)).full_tensor()
