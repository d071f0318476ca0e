"""One all-to-all of token rows between the ranks of a group: out, and back with the sum of what a token's copies became.

Axes: T input tokens, G ranks of the group, S rows sent, R rows received, B bytes of a packed row.

A row carries everything that belongs to it, packed into bytes, so that a hop is one collective. A row of x[T, H] with K experts
is H · itemsize(x) + K · (itemsize(weights) + 2) bytes out, and H · itemsize(y) bytes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from slipstream.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Hop:
    """Who sends which rows to whom. Made by `plan`; lives as long as the handle of the dispatch that it is of."""

    group: dist.ProcessGroup
    index: torch.Tensor  # int64 [S]: input row of each row sent; by destination, ascending within it
    sent: list[int]  # [G] rows for each rank
    received: list[int]  # [G] rows from each rank
    tokens: int  # T

    def out(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, B] -> [R, B], by source rank, in the order of the source."""
        return all_to_all(rows.index_select(0, self.index), self.received, self.sent, self.group)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, B] -> [S, B]: each row to where it came from, in the order in which it was sent."""
        return all_to_all(rows, self.sent, self.received, self.group)

    def sums(self, rows: torch.Tensor, nodes: int = 1) -> torch.Tensor:
        """Of rows that came back, [S, H] -> [T, H]: the sum of each token's copies, in the dtype of `rows`.

        In the order of ranks, so that it does not depend on arrival; with `nodes` > 1 first within blocks of neighbours,
        rounded to the dtype as if it had travelled, then over the blocks.
        """
        accumulate = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((self.tokens, rows.shape[1]), dtype=accumulate)
        copies = list(zip(rows.split(self.sent), self.index.split(self.sent), strict=True))
        size = len(self.sent) // nodes
        for node in range(nodes):
            sink = total if nodes == 1 else torch.zeros_like(total)
            for part, place in copies[node * size : (node + 1) * size]:
                sink.index_add_(0, place, part.to(accumulate))  # a token has one row for each rank: nothing races
            if nodes > 1:
                total += sink.to(rows.dtype).to(accumulate)
        return total.to(rows.dtype)


def plan(wanted: torch.Tensor, group: dist.ProcessGroup, foreseen: tuple[list[int], list[int]] | None = None) -> Hop:
    """A hop in which row t goes to rank g when `wanted[t, g]`. Collective: ranks tell each other how many rows come.

    Unless it is `foreseen` (rows for each rank, rows from each rank), on all ranks of the group: then nobody asks. Raises
    InvalidInput when other rows are wanted.
    """
    destination, index = wanted.t().nonzero(as_tuple=True)
    counts = torch.bincount(destination, minlength=wanted.shape[1])
    if foreseen is not None:
        if (found := counts.tolist()) != foreseen[0]:
            raise InvalidInput(
                f"an exchange sends {found} tokens to its ranks, and {foreseen[0]} were foreseen from recorded routes: they "
                "are not of these tokens or layers. Set trainer.parallel.plan_routes = false, and report the model's class",
                "ROUTES_FORESEEN", field="routes")
        return Hop(group, index, *foreseen, len(wanted))
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts, group=group)
    sent, received = torch.stack([counts, came]).tolist()
    return Hop(group, index, sent, received, len(wanted))


def all_to_all(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows by destination -> rows by source."""
    found = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


def pack(fields: Sequence[torch.Tensor]) -> torch.Tensor:
    """Fields [T, n] of any dtype side by side: uint8 [T, B]."""
    return torch.cat([_bytes(field) for field in fields], dim=1)


def _bytes(field: torch.Tensor) -> torch.Tensor:
    """[T, n] -> [T, n · itemsize]. Through one dimension: an empty tensor counts as contiguous whatever its strides."""
    return field.contiguous().reshape(-1).view(torch.uint8).view(len(field), field.shape[1] * field.element_size())


def unpack(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `pack`, into dtypes and widths of `like`."""
    found, start = [], 0
    for field in like:
        size = field.shape[1] * field.element_size()
        found.append(rows[:, start : start + size].reshape(-1).view(field.dtype).view(len(rows), field.shape[1]))
        start += size
    return found


def hits(ids: torch.Tensor, size: int, groups: int) -> torch.Tensor:
    """bool [T, groups]: whether one of a token's ids lies in [g · size, (g + 1) · size). Negative ids lie nowhere."""
    found = torch.zeros((len(ids), groups + 1), dtype=torch.bool, device=ids.device)
    places = torch.where(ids < 0, groups, torch.div(ids, size, rounding_mode="floor"))
    return found.scatter_(1, places, True)[:, :groups]


def local_ids(ids: torch.Tensor, rank: int, local: int) -> torch.Tensor:
    """Global expert ids -> those of `rank`, which has `local`; -1 for all others."""
    mine = (ids >= rank * local) & (ids < (rank + 1) * local)
    return torch.where(mine, ids - rank * local, -1)
