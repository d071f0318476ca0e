"""Which exchange is the fastest on a fabric, by counting rows. The same formulas predict bytes exactly; see docs/envelope.md.

Axes: E experts, K of them per token, W ranks on N nodes of L each.

A token's K experts are drawn without replacement; the chance that a given set of m experts is hit is

    p(m) = 1 − C(E − m, K) / C(E, K)                                                                    (1)

Copies of a token that leave its rank, over links between nodes (slow) and within them (fast), each way:

    exchange        slow                fast
    copy            K (N−1) / N         K (L−1) / W
    flat            (W−L) p(E/W)        (L−1) p(E/W)
    hierarchical    (N−1) p(E/N)        N (L−1) p(E/W)
    all_gather      W−L                 L−1

Time: a hierarchical exchange makes its hops one after the other, slow / B_slow + fast / B_fast; a single all-to-all uses both
kinds of link at once and takes the longer. DeepEP's hybrid kernel sends what `hierarchical` does and overlaps the hops. Each
collective costs a constant on top. Uniform routing is assumed; skew lengthens all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

EXCHANGES = ("deep_ep", "hierarchical", "flat", "all_gather", "copy")


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of one rank."""

    ranks: int  # W
    width: int  # L
    fast_gb_s: float  # GB/s each way, within a node
    slow_gb_s: float  # GB/s each way, between nodes
    collective_ms: float = 0.05

    @property
    def nodes(self) -> int:
        """N"""
        return self.ranks // self.width


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixture-of-experts layer."""

    experts: int  # E
    top_k: int  # K
    hidden: int  # H
    item: int = 2  # bytes of an element of x
    weight_item: int = 4  # bytes of a routing weight

    @property
    def out_bytes(self) -> int:
        """Of a dispatched row."""
        return self.hidden * self.item + self.top_k * (self.weight_item + 2)

    @property
    def back_bytes(self) -> int:
        """Of a combined row."""
        return self.hidden * self.item


@dataclass(frozen=True, slots=True)
class Choice:
    """An exchange and the reason, for the log and the run's metrics."""

    name: str
    why: str
    predicted_ms: dict[str, float]  # of dispatch and combine together, by exchange


def hit(experts: int, top_k: int, of: int) -> float:
    """Formula (1): the chance that a token needs one of `of` given experts."""
    return 1.0 - comb(experts - of, top_k) / comb(experts, top_k)


def copies(name: str, layer: Layer, fabric: Fabric) -> tuple[float, float]:
    """(slow, fast) copies of one token, each way."""
    ranks, width, nodes, top_k = fabric.ranks, fabric.width, fabric.nodes, layer.top_k
    rank = hit(layer.experts, top_k, layer.experts // ranks)
    if name == "copy":
        return top_k * (nodes - 1) / nodes, top_k * (width - 1) / ranks
    if name == "flat":
        return (ranks - width) * rank, (width - 1) * rank
    if name == "all_gather":
        return float(ranks - width), float(width - 1)
    return (nodes - 1) * hit(layer.experts, top_k, layer.experts // nodes), nodes * (width - 1) * rank


def slow_bytes(name: str, layer: Layer, fabric: Fabric, tokens: int) -> float:
    """Bytes over slow links that the tokens of one rank cause in dispatch and combine."""
    out = layer.hidden * layer.item + (layer.weight_item + 2) if name == "copy" else layer.out_bytes
    return tokens * copies(name, layer, fabric)[0] * (out + layer.back_bytes)


def predicted_ms(name: str, layer: Layer, fabric: Fabric, tokens: int) -> float:
    """Of dispatch and combine of `tokens` tokens on each rank."""
    slow, fast = copies(name, layer, fabric)
    size = tokens * (layer.out_bytes + layer.back_bytes) / 1e6
    slow_ms, fast_ms = slow * size / fabric.slow_gb_s, fast * size / fabric.fast_gb_s
    if name == "hierarchical":
        return slow_ms + fast_ms + 6 * fabric.collective_ms
    return max(slow_ms, fast_ms) + (2 if name == "deep_ep" else 3) * fabric.collective_ms


def choose(layer: Layer, fabric: Fabric, tokens: int, among: Sequence[str]) -> Choice:
    """The exchange of `among` that the model says is the fastest; the earlier of two equal ones."""
    times = {name: predicted_ms(name, layer, fabric, tokens) for name in among}
    name = min(times, key=lambda n: times[n])
    told = ", ".join(f"{n} {ms:.2f}" for n, ms in sorted(times.items(), key=lambda entry: entry[1]))
    ratio = fabric.fast_gb_s / fabric.slow_gb_s
    return Choice(name, (
        f"{name}: predicted ms of dispatch + combine for {tokens} tokens a rank are {told} (E={layer.experts}, "
        f"K={layer.top_k}, H={layer.hidden}, {fabric.nodes} nodes of {fabric.width} ranks, links {ratio:.1f}:1)"), times)
