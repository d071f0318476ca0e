"""`deep_ep`: DeepEP's V2 `ElasticBuffer`, NVLink within a node and EFA (or InfiniBand) between nodes, as an ExpertParallel.

Not yet run on a GPU: written against DeepEP 2.1.0's public interface and tested on a stand-in of it, tests/parallel/stand_in.

Compact mode: one row for each (token, destination rank), bfloat16, weights float32. What the library asks and does not check,
or answers with a hang:
- the communicator of the group must exist before the buffer: one all-reduce on the very group comes first;
- C, the most tokens a rank may send, is a compile-time constant of its kernels and equal on all ranks: one fixed value, longer
  inputs are cut into `rounds`, as many on each rank;
- num_sms is given: its guess divides by the speed of a link that EFA does not report, and a cached dispatch has no default;
- a rank without tokens sends one of zeros to k distinct experts with zero weights, and drops it from what comes back;
- rows come in any order unless it is told to sort them: a layer that is computed again in the backward pass would meet other
  rows than those that its handle is of, so they are sorted, and repetitions give the same bits;
- weights, and gradients of weights, are contiguous float32; tokens and rows are contiguous bfloat16.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional

from services.trainer.parallel.deep_ep_checks import ALIGNMENT, Demand, problems
from services.trainer.parallel.exchange import Received, check_tokens
from slipstream.errors import ConfigError, InvalidInput

TIMEOUT_S = 300  # of the library's own waits: a peer that compiles kernels is slow, not dead; NCCL's time-out ends the others


@dataclass(frozen=True, slots=True)
class DeepHandle:
    """Of one dispatch."""

    inner: Any  # deep_ep.EPHandle
    idx: torch.Tensor  # int64 [R, K]
    tokens: int  # T, without the dummy


class DeepEP:
    """ExpertParallel on DeepEP. Raises ConfigError with every constraint that does not hold; the constructor is collective."""

    name = "deep_ep"

    def __init__(self, group: dist.ProcessGroup, demand: Demand, device: torch.device) -> None:
        if found := problems(demand):
            raise ConfigError("trainer.parallel.exchange = deep_ep cannot be used here: " + "; ".join(found))
        self._library = library()
        self.group, self.experts, self._demand = group, demand.experts, demand
        self._device, self._width = device, demand.padded_hidden
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._buffer: Any = self._library.ElasticBuffer(
            group, num_max_tokens_per_rank=demand.max_tokens, hidden=self._width, num_topk=demand.top_k,
            use_fp8_dispatch=False, deterministic=True, allow_hybrid_mode=demand.hybrid,
            allow_multiple_reduction=demand.partial_sums, num_cpu_timeout_secs=TIMEOUT_S, num_gpu_timeout_secs=TIMEOUT_S,
            explicitly_destroy=True)

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        handle: DeepHandle | None = None,
    ) -> Received:
        if handle is not None:
            return self._again(x, handle)
        check_tokens(x, topk_idx, topk_weights, self.experts)
        assert topk_idx is not None and topk_weights is not None
        tokens, demand = len(x), self._demand
        if tokens > demand.max_tokens:
            raise InvalidInput(
                f"{tokens} tokens exceed trainer.parallel.max_tokens = {demand.max_tokens}: use rounds", "TOKENS")
        if not tokens:
            topk_idx = torch.arange(demand.top_k, device=x.device)[None]
            topk_weights = topk_weights.new_zeros((1, demand.top_k))
        rows, idx, weights, inner, _ = self._buffer.dispatch(
            self._sendable(x, demand.hidden), topk_idx=topk_idx.to(self._library.topk_idx_t).contiguous(),
            topk_weights=topk_weights.float().contiguous(), num_experts=demand.experts,
            num_max_tokens_per_rank=demand.max_tokens, expert_alignment=ALIGNMENT, num_sms=demand.num_sms, do_cpu_sync=True)
        count = inner.num_recv_tokens
        ids = idx[:count].long()
        return Received(rows[:count, : demand.hidden], ids, weights[:count], DeepHandle(inner, ids, tokens))

    def combine(
        self, rows: torch.Tensor, handle: DeepHandle, weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        sent = None if weights is None else weights.float().masked_fill(handle.idx < 0, 0.0).contiguous()
        out, back, _ = self._buffer.combine(
            self._padded(rows), handle=handle.inner, topk_weights=sent, num_sms=handle.inner.num_sms)
        return out[: handle.tokens, : self._demand.hidden], None if back is None else back[: handle.tokens]

    def rounds(self, tokens: int) -> int:
        needed = torch.tensor([max(1, -(-tokens // self._demand.max_tokens))], device=self._device)
        dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self.group)
        return int(needed)

    def close(self) -> None:
        self._buffer.destroy()

    def _again(self, x: torch.Tensor, handle: DeepHandle) -> Received:
        """Along the way of an earlier dispatch. Tensors of rows are as long as the handle says: it was made with a CPU sync."""
        rows, *_ = self._buffer.dispatch(
            self._sendable(x, self._demand.hidden), num_experts=self._demand.experts,
            num_max_tokens_per_rank=self._demand.max_tokens, expert_alignment=ALIGNMENT, num_sms=handle.inner.num_sms,
            handle=handle.inner, do_cpu_sync=False)
        return Received(rows[: len(handle.idx), : self._demand.hidden], handle.idx, None, handle)

    def _sendable(self, x: torch.Tensor, hidden: int) -> torch.Tensor:
        return self._padded(x if len(x) else x.new_zeros((1, hidden)))

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """bfloat16, contiguous, and as wide as the buffer."""
        if rows.dtype != torch.bfloat16:
            raise InvalidInput(f"DeepEP carries bfloat16, not {rows.dtype}: set model.dtype = bfloat16", "DTYPE")
        return functional.pad(rows, (0, self._width - rows.shape[1])).contiguous()


def library() -> Any:
    """The module. Raises ConfigError when it is not installed, or of another generation."""
    try:
        found = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ConfigError(
            "trainer.parallel.exchange = deep_ep, but the module deep_ep cannot be imported "
            f"({error}): install DeepEP 2.1 in the trainer's image, or set hierarchical") from error
    if not hasattr(found, "ElasticBuffer"):
        raise ConfigError(
            f"deep_ep {getattr(found, '__version__', '1')} has no ElasticBuffer: DeepEP 2.1 or later is needed; or set "
            "trainer.parallel.exchange = hierarchical")
    return found
