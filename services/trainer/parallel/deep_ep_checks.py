"""Every constraint of DeepEP that is known before the first step, each with what to do about it. Loads no torch.

Source: DeepEP 2.1.0, deep_ep/buffers/elastic.py and csrc/elastic/buffer.hpp; see docs/guides/expert-parallelism.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

ALIGNMENT = 1  # rows of an expert are not padded: transformers' kernels sort them anyway
HIDDEN_MULTIPLE = 256  # combine's kernel: a static assertion
MAX_TOKENS = 8192
PAGE = 2 << 20  # buffer sizes are multiples of it


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model and a mesh ask of DeepEP."""

    experts: int
    top_k: int
    hidden: int
    ranks: int
    ranks_per_node: int
    dtype: str = "bfloat16"
    max_tokens: int = 4096  # C
    num_sms: int = 24
    hybrid: bool = True  # one copy a node, relayed over NVLink
    partial_sums: bool = True  # a node sums before it answers: fewer bytes, one more rounding
    pad_hidden: bool = False
    capability: tuple[int, int] | None = None  # of the GPU; None = no GPU, as in tests
    group_ranks: tuple[int, ...] = ()  # global ranks of the expert group; empty = consecutive
    fills_uninitialised: bool = False  # torch.use_deterministic_algorithms with fill_uninitialized_memory

    @property
    def padded_hidden(self) -> int:
        """Width of a row on the wire."""
        return ceil(self.hidden / HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE if self.pad_hidden else self.hidden

    @property
    def nodes(self) -> int:
        return max(1, self.ranks // self.ranks_per_node)

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.experts // self.ranks


def problems(d: Demand) -> list[str]:
    """All that does not hold, as sentences of field, value and remedy. Empty when DeepEP can be used."""
    return [message for broken, message in [*_of_the_model(d), *_of_the_mesh(d), *_of_the_settings(d)] if broken]


def _of_the_model(d: Demand) -> list[tuple[bool, str]]:
    return [
        (d.dtype != "bfloat16", f"model.dtype = {d.dtype}: it carries bfloat16 only; set model.dtype = bfloat16"),
        (d.padded_hidden % HIDDEN_MULTIPLE != 0,
         f"hidden size {d.hidden} is no multiple of {HIDDEN_MULTIPLE}; set trainer.parallel.pad_hidden = true"),
        (d.top_k > 32, f"{d.top_k} experts per token exceed 32; set trainer.parallel.exchange = hierarchical"),
        (d.top_k > d.experts, f"{d.top_k} experts per token of {d.experts}: correct the model's configuration"),
        (d.experts > 2048, f"{d.experts} experts exceed 2048; set trainer.parallel.exchange = hierarchical"),
        (d.capability is not None and d.capability < (9, 0),
         f"GPU capability {d.capability}: SM90 or later is needed (no p4d); set trainer.parallel.exchange = hierarchical"),
    ]


def _of_the_mesh(d: Demand) -> list[tuple[bool, str]]:
    first = d.group_ranks[0] if d.group_ranks else 0
    consecutive = d.group_ranks in ((), tuple(range(first, first + d.ranks)))
    return [
        (d.experts % d.ranks != 0,
         f"{d.experts} experts on {d.ranks} ranks; set trainer.parallel.experts to a divisor of {d.experts}"),
        (d.ranks > 1024, f"{d.ranks} ranks exceed 1024; lower trainer.parallel.experts"),
        (d.local > 256, f"{d.local} experts a rank exceed 256; raise trainer.parallel.experts"),
        (d.ranks > d.ranks_per_node and d.ranks % d.ranks_per_node != 0,
         f"{d.ranks} ranks are not whole nodes of {d.ranks_per_node}; set trainer.parallel.experts to a multiple"),
        (not consecutive or (d.hybrid and d.nodes > 1 and first % d.ranks_per_node != 0),
         "ranks of a node are not neighbours in the expert group; start torchrun with one block of ranks a node"),
        (d.hybrid and d.nodes > 32, f"{d.nodes} nodes exceed 32 in hybrid mode; set trainer.parallel.hybrid = false"),
        (d.hybrid and min(d.ranks, d.ranks_per_node) > 64,
         f"{d.ranks_per_node} NVLink ranks exceed 64 in hybrid mode; set trainer.parallel.hybrid = false"),
        (d.hybrid and min(d.ranks, d.ranks_per_node) + d.local > 128,
         f"{min(d.ranks, d.ranks_per_node)} NVLink ranks + {d.local} experts a rank exceed 128 in hybrid mode; raise "
         "trainer.parallel.experts, or set trainer.parallel.hybrid = false"),
    ]


def _of_the_settings(d: Demand) -> list[tuple[bool, str]]:
    return [
        (d.num_sms < 1, f"trainer.parallel.num_sms = {d.num_sms}: give a number, 24 is good; it cannot be guessed on EFA"),
        (not 1 <= d.max_tokens <= MAX_TOKENS,
         f"trainer.parallel.max_tokens = {d.max_tokens} is not in 1..{MAX_TOKENS}; longer micro-batches go in rounds"),
        (d.fills_uninitialised,
         "torch fills uninitialised memory in deterministic mode, which DeepEP refuses; set "
         "torch.utils.deterministic.fill_uninitialized_memory = False"),
    ]


def buffer_bytes(d: Demand) -> int:
    """GPU memory of the buffer, [bytes]: DeepEP's formula for hybrid mode with partial sums and bfloat16."""
    def aligned(n: int) -> int:
        return ceil(n / 16) * 16

    h, k, c, n = d.padded_hidden, d.top_k, d.max_tokens, d.nodes
    out = aligned(2 * h) + aligned(8 * k + 4 * (1 + k))
    back = aligned(2 * h) + aligned(8 * k)
    width = min(d.ranks, d.ranks_per_node)
    most = max(out * (width * n * c + c + n * (c + 1280)), back * (min(k, width) * n * c + min(n, k) * c + n * (c + 1280)))
    return ceil(most / PAGE) * PAGE
