"""The handle of a dispatch, with the fields of the library's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class EPHandle:
    """Good for any number of cached dispatches and combines while its buffer lives."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: torch.Tensor  # int64 [T, K]
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor  # int32 [R, 2 + K]: source rank · C + token, opaque, garbage in compact mode
    recv_topk_idx: torch.Tensor
    buffer: Any = field(repr=False)
