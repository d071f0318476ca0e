"""Which ranks share a node: the groups that a hierarchical exchange runs on.

Rank r of a group of N · L is (node r // L, place r % L): ranks of a node are neighbours, as torchrun numbers them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed as dist

from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """A group of `nodes` · `width` ranks, seen from one of them."""

    group: dist.ProcessGroup
    node: dist.ProcessGroup  # the ranks of this node
    rail: dist.ProcessGroup  # the ranks with this place, one a node
    nodes: int
    width: int

    @property
    def node_index(self) -> int:
        """Number of this node."""
        return dist.get_rank(self.rail)


_known: dict[tuple[tuple[int, ...], int], Topology] = {}  # communicators are few and dear: all layers share one


def topology(group: dist.ProcessGroup, width: int) -> Topology:
    """`width` ranks of the group are on a node. Collective at the first call for a group. Raises ConfigError."""
    ranks = tuple(dist.get_process_group_ranks(group))
    width = min(width, len(ranks))
    if len(ranks) % width:
        raise ConfigError(
            f"trainer.parallel.ranks_per_node = {width} does not divide the {len(ranks)} ranks of an expert group; use whole "
            "nodes, or set it to a divisor")
    if (found := _known.get((ranks, width))) is not None:
        return found
    here = ranks.index(dist.get_rank())
    node, place = divmod(here, width)
    made = Topology(
        group, _group(ranks[node * width : (node + 1) * width]), _group(ranks[place::width]), len(ranks) // width, width)
    _known[ranks, width] = made
    return made


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Of these ranks; only they take part in making it."""
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def forget() -> None:
    """After the process group is destroyed: its groups are gone."""
    _known.clear()
