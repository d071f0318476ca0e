"""ElasticBuffer on gloo: every rank tells every other everything, and each picks what is its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from . import checks
from .events import EventHandle, EventOverlap
from .handle import EPHandle

NVLINK_RANKS = int(os.environ.get("EP_STAND_IN_NVLINK_RANKS", "8"))


class Buffer:
    """V1: its interface is not offered."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError("the stand-in has V2 only")


class ElasticBuffer:
    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0, use_fp8_dispatch=False,
        deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=3,
        num_allocated_qps=0, num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):
        assert num_max_tokens_per_rank > 0 and hidden > 0, "num_max_tokens_per_rank and hidden size the buffer"
        assert num_topk > 0, "num_topk = 0 sizes for 32 lanes"
        assert group._get_sequence_number_for_group() > 0, "segmentation fault: the group has no communicator yet"
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.most, self.hidden, self.topk = num_max_tokens_per_rank, hidden, num_topk
        self.deterministic, self.hybrid = deterministic, allow_hybrid_mode
        self.multiple_reduction, self.explicitly_destroy = allow_multiple_reduction, explicitly_destroy
        self.live, self.calls = True, 0
        checks.same(group, ("new", self.most, hidden, num_topk, use_fp8_dispatch, deterministic, allow_hybrid_mode))

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False, handle=None,
        do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False, use_tma_aligned_col_major_sf=False,
    ):
        assert self.live, "the buffer is destroyed"
        assert not do_expand, "do_expand: not offered by the stand-in"
        assert not do_zero_padding, "do_zero_padding needs do_expand"
        checks.events(previous_event, allocate_on_comm_stream)
        most = self.most if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        assert most <= self.most, "num_max_tokens_per_rank exceeds what the buffer was made for"
        checks.tokens(x, most, self.hidden)
        if handle is None:
            assert topk_idx is not None and num_experts is not None, "topk_idx and num_experts, or a handle"
            checks.world(self.group, num_experts, self.hybrid, NVLINK_RANKS)
            checks.routes(topk_idx, len(x), num_experts)
            assert topk_idx.shape[1] <= self.topk, "topk_idx: more lanes than the buffer was made for"
            if num_sms == 0:
                raise ZeroDivisionError("rdma_gbs is 0 on EFA: num_sms cannot be guessed")
        else:
            self._fits(handle, len(x), topk_idx, num_experts, most, expert_alignment, do_cpu_sync)
            assert cumulative_local_expert_recv_stats is None, "stats with a handle"
            if num_sms == 0:
                raise TypeError("num_sms = 0 with a handle")
            assert num_sms == handle.num_sms, "num_sms differs from the handle's"
        lanes = (handle.topk_idx if handle is not None else topk_idx).shape[1]
        checks.weights(topk_weights, len(x), lanes, "topk_weights")
        self._same("dispatch", most, num_experts, lanes, x, expert_alignment or 1, num_sms, handle is not None)
        idx = handle.topk_idx if handle is not None else topk_idx.clone() if do_handle_copy else topk_idx
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, (x, idx, topk_weights), group=self.group)
        if handle is None:
            handle = self._handle(everybody, num_experts, most, expert_alignment or 1, num_sms, idx)
            sync = do_cpu_sync is not False
        else:
            sync = True  # the handle knows how many rows come
        places = [divmod(place, most) for place in handle.recv_src_metadata[:, 0].tolist()]
        rows = torch.stack([everybody[r][0][t] for r, t in places]) if places else x.new_zeros((0, x.shape[1]))
        weights = None
        if topk_weights is not None:
            weights = torch.stack([everybody[r][2][t] for r, t in places]) if places else topk_weights.new_zeros((0, lanes))
        outputs = [rows, handle.recv_topk_idx.clone(), weights]
        if not sync:
            outputs = [None if o is None else _longer(o, most * self.ranks) for o in outputs]
        outputs, event = _deliver(outputs, async_with_compute_stream)
        return outputs[0], outputs[1], outputs[2], handle, event

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):
        assert self.live and handle.buffer is self, "the handle is of another buffer, or its buffer is destroyed"
        checks.events(previous_event, allocate_on_comm_stream)
        assert x.dtype == torch.bfloat16 and x.ndim == 2 and x.is_contiguous(), "x: contiguous bfloat16"
        assert x.shape[1] % 256 == 0, "x: hidden % 256"
        assert len(x) == len(handle.recv_src_metadata), f"x: {len(x)} rows, {len(handle.recv_src_metadata)} were received"
        lanes = handle.topk_idx.shape[1]
        checks.weights(topk_weights, len(x), lanes, "topk_weights")
        if num_sms == 0:
            raise ZeroDivisionError("rdma_gbs is 0 on EFA: num_sms cannot be guessed")
        assert num_sms == handle.num_sms, "num_sms differs from the handle's"
        self._same(
            "combine", handle.num_max_tokens_per_rank, handle.num_experts, lanes, x, handle.expert_alignment, num_sms, True)
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, (x, handle.recv_src_metadata[:, 0], topk_weights), group=self.group)
        out = self._sums(everybody, handle, x.shape[1])
        for part in () if bias is None else (bias if isinstance(bias, tuple) else (bias,)):
            out = (out.float() + part.float()).to(x.dtype)
        weights = None if topk_weights is None else self._lanes(everybody, handle)
        (out, weights), event = _deliver([out, weights], async_with_compute_stream)
        return out, weights, event

    @staticmethod
    def get_buffer_size_hint(
        group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, allow_hybrid_mode=True,
        allow_multiple_reduction=True,
    ):
        return -(-dist.get_world_size(group) * num_max_tokens_per_rank * hidden * 2 // (2 << 20)) * (2 << 20)

    def get_logical_domain_size(self):
        return max(1, self.ranks // NVLINK_RANKS), min(self.ranks, NVLINK_RANKS)

    def capture(self):
        return EventHandle()

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        self._same("barrier", 0, 0, 0, torch.zeros(1, 1), 0, 0, False)

    def destroy(self):
        assert self.explicitly_destroy, "destroy needs explicitly_destroy=True"
        assert self.live, "destroyed twice"
        self.barrier()
        self.live = False

    def _same(self, op, most, experts, lanes, x, alignment, sms, cached):
        self.calls += 1
        checks.same(self.group, (op, most, experts, lanes, x.shape[1], str(x.dtype), alignment, sms, cached, self.calls))

    def _fits(self, handle, rows, topk_idx, experts, most, alignment, sync):
        assert handle.buffer is self, "the handle is of another buffer"
        assert topk_idx is None, "topk_idx with a handle"
        assert not sync, "do_cpu_sync with a handle"
        assert rows == len(handle.topk_idx), "x: another number of tokens than the handle's"
        assert experts in (None, handle.num_experts), "num_experts differs from the handle's"
        assert most == handle.num_max_tokens_per_rank, "num_max_tokens_per_rank differs from the handle's"
        assert alignment in (None, handle.expert_alignment), "expert_alignment differs from the handle's"

    def _handle(self, everybody, experts, most, alignment, sms, idx):
        local = experts // self.ranks
        places, ids = [], []
        for source, (_, theirs, _) in enumerate(everybody):
            for token, chosen in enumerate(theirs.tolist()):
                mine = [e - self.rank * local if e // local == self.rank and e >= 0 else -1 for e in chosen]
                if max(mine) >= 0:
                    places.append(source * most + token)
                    ids.append(mine)
        width = min(NVLINK_RANKS, self.ranks)
        order = np.arange(len(places))  # by source rank and token
        if not self.deterministic:  # within a source of the NVLink domain any order may come
            np.random.default_rng([self.rank, self.calls]).shuffle(order)
            order = sorted(order, key=lambda i: (places[i] // most) % width)
        metadata = torch.full((len(places), 2 + idx.shape[1]), -(1 << 20), dtype=torch.int32)
        metadata[:, 0] = torch.tensor([places[i] for i in order], dtype=torch.int32)
        received = torch.tensor([ids[i] for i in order], dtype=torch.int64).reshape(len(places), idx.shape[1])
        counts = torch.bincount(received[received >= 0], minlength=local)
        aligned = (counts + alignment - 1) // alignment * alignment
        sources = torch.bincount(metadata[:, 0].long() // most % width, minlength=width)
        return EPHandle(
            False, experts, alignment, most, sms, idx, len(places), 0, aligned.tolist(), sources.cumsum(0).int(),
            aligned.cumsum(0).int(), metadata, received, self)

    def _sums(self, everybody, handle, hidden):
        """float32 within a level, rounded to bfloat16 after each: ranks of a node, then nodes."""
        width = min(NVLINK_RANKS, self.ranks) if self.hybrid and self.multiple_reduction else self.ranks
        total = torch.zeros((len(handle.topk_idx), hidden))
        for first in range(0, self.ranks, width):
            part = torch.zeros_like(total)
            for rows, places, _ in everybody[first : first + width]:
                own = places.long() // handle.num_max_tokens_per_rank == self.rank
                part.index_add_(0, places[own].long() % handle.num_max_tokens_per_rank, rows[own].float())
            total += part.bfloat16().float()
        return total.bfloat16()

    def _lanes(self, everybody, handle):
        """Each lane from the rank that owns its expert; 0 where there is none."""
        local = handle.num_experts // self.ranks
        found = torch.zeros(handle.topk_idx.shape)
        for rank, (_, places, weights) in enumerate(everybody):
            own = places.long() // handle.num_max_tokens_per_rank == self.rank
            tokens = places[own].long() % handle.num_max_tokens_per_rank
            mine = (handle.topk_idx[tokens] >= 0) & (handle.topk_idx[tokens] // local == rank)
            found[tokens] = torch.where(mine, weights[own], found[tokens])
        return found


def _longer(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """As without a CPU sync: the worst case, and what nobody wrote is poison."""
    poison = float("nan") if tensor.is_floating_point() else 1 << 30
    found = torch.full((rows, tensor.shape[1]), poison, dtype=tensor.dtype)
    found[: len(tensor)] = tensor
    return found


def _deliver(outputs, later):
    """At once, or poisoned until somebody waits for the event."""
    if not later:
        return outputs, EventOverlap()
    found = [None if o is None else torch.full_like(o, float("nan") if o.is_floating_point() else 1 << 30) for o in outputs]

    def arrive() -> None:
        for empty, full in zip(found, outputs, strict=True):
            if empty is not None:
                empty.copy_(full)

    return found, EventOverlap(EventHandle(arrive))
