"""Mistakes that an adapter of DeepEP can make, most of them found in one that is in use elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in the adapter."""

    id: str
    old: str
    new: str


FAULTS = (
    Fault("tokens not contiguous", "(0, self._width - rows.shape[1])).contiguous()", "(0, self._width - rows.shape[1]))"),
    Fault("ids not contiguous", "topk_idx.to(self._library.topk_idx_t).contiguous()", "topk_idx.to(self._library.topk_idx_t)"),
    Fault("weights not contiguous", "topk_weights.float().contiguous()", "topk_weights.float()"),
    Fault("weights of another dtype", "topk_weights=topk_weights.float().contiguous()", "topk_weights=topk_weights.bfloat16()"),
    Fault("gradients of weights not contiguous", "masked_fill(handle.idx < 0, 0.0).contiguous()",
          "masked_fill(handle.idx < 0, 0.0).t().contiguous().t()"),
    Fault("gradients of weights in the dtype of tokens", "weights.float().masked_fill", "weights.to(rows.dtype).masked_fill"),
    Fault("gradients of weights dropped", "topk_weights=sent, num_sms", "topk_weights=None, num_sms"),
    Fault("handle dropped", "            handle=handle.inner, do_cpu_sync=False)",
          "            topk_idx=handle.inner.topk_idx, do_cpu_sync=True)"),
    Fault("CPU sync with a handle", "handle=handle.inner, do_cpu_sync=False", "handle=handle.inner, do_cpu_sync=True"),
    Fault("SMs not given with a handle", "num_sms=handle.inner.num_sms,\n            handle", "num_sms=0,\n            handle"),
    Fault("SMs not given at first", "num_sms=demand.num_sms, do_cpu_sync=True", "do_cpu_sync=True"),
    Fault("SMs not given to combine", "topk_weights=sent, num_sms=handle.inner.num_sms", "topk_weights=sent"),
    Fault("local number of tokens as the most", "num_max_tokens_per_rank=demand.max_tokens, expert_alignment",
          "num_max_tokens_per_rank=max(1, tokens), expert_alignment"),
    Fault("no CPU sync, tail kept", "do_cpu_sync=True)\n        count = inner.num_recv_tokens",
          "do_cpu_sync=False)\n        count = len(rows)"),
    Fault("rows in another order", "Received(rows[: len(handle.idx), : self._demand.hidden], handle.idx, None, handle)",
          "Received(rows[: len(handle.idx), : self._demand.hidden].flip(0), handle.idx, None, handle)"),
    Fault("no dummy token", "x if len(x) else x.new_zeros((1, hidden))", "x"),
    Fault("dummy of one expert", "torch.arange(demand.top_k, device=x.device)[None]",
          "torch.zeros((1, demand.top_k), dtype=torch.int64)"),
    Fault("dummy not dropped", "return out[: handle.tokens, : self._demand.hidden]", "return out[:, : self._demand.hidden]"),
    Fault("padding of the hidden size kept", "Received(rows[:count, : demand.hidden]", "Received(rows[:count]"),
    Fault("no communicator before the buffer", "        dist.all_reduce(torch.zeros(1, device=device), group=group)\n", ""),
    Fault("own number of rounds", "        dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=self.group)\n", ""),
    Fault("rounds summed", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.SUM"),
    Fault("buffer without lanes", "num_topk=demand.top_k,\n", "\n"),
    Fault("never destroyed", "        self._buffer.destroy()", "        pass"),
    Fault("destroy not announced", "            explicitly_destroy=True)", "            )"),
    Fault("ids of another rank's experts", "ids = idx[:count].long()", "ids = idx[:count].long().clamp(min=0)"),
    Fault("rows in any order", "deterministic=True", "deterministic=False"),
    Fault("any dtype cast", "if rows.dtype != torch.bfloat16:", "if rows.dtype == torch.float64:"),
    Fault("longer inputs sent", "if tokens > demand.max_tokens:", "if tokens > 2 * demand.max_tokens:"),
)
