"""Exchanges of tokens on an emulated fabric: bytes over the slow links, time of dispatch + combine, and of whole steps.

    python -m benchmarks.fabric [--nodes 2] [--width 2] [--slow 222] [--fast 2000] [--json FILE]      needs root (ip netns, tbf)

Every baseline side by side: `all_gather`; `copy`, one row for each (token, expert), the traffic of transformers' stock
all_to_all; `flat`, one for each rank; `hierarchical`, one for each node. Repetitions are interleaved and the least time is
shown, because other work on the machine only ever adds.

Compute is emulated by sleeping, for a device that does not use our CPUs: --compute is its share of the `copy` step. Overlap
runs two micro-batches, the exchange of one beside the compute of the other, forward only. No claim about GPUs, NVLink, EFA or
rollout throughput follows from any of this: only bytes are exact, the rest is about TCP on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.fabric_links import Links, enter, missing, on_ranks, sent_bytes
from services.trainer.parallel import exchange as seam
from services.trainer.parallel.baselines import AllGather, Copies
from services.trainer.parallel.cost import Fabric, Layer, slow_bytes
from services.trainer.parallel.flat import Flat
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.topology import topology

MODES = ("all_gather", "copy", "flat", "hierarchical")
ROW = 128  # tokens of a rank in a decode-shaped step


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the layer and the measurement."""

    experts: int
    top_k: int
    hidden: int
    tokens: int  # of each rank
    layers: int
    repetitions: int
    compute: float  # share of the copy step


def rank_main(rank: int, links: Links, sizes: Sizes, pipe: Any) -> None:
    """One rank, in its node's namespace."""
    enter(links.namespace(rank // links.width))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    ranks = links.nodes * links.width
    store = dist.TCPStore(links.address(0), 29555, ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    group = dist.group.WORLD
    assert group is not None
    places = topology(group, links.width)
    exchanges = {
        "all_gather": AllGather(group, sizes.experts), "copy": Copies(group, sizes.experts), "flat": Flat(group, sizes.experts),
        "hierarchical": Hierarchical(places, sizes.experts)}
    found = {"exchange": measured(exchanges, sizes, links), "step": steps(exchanges, sizes, sizes.tokens),
             "decode": steps(exchanges, sizes, ROW)}
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def inputs(sizes: Sizes, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's tokens, uniform routes and weights."""
    torch.manual_seed(dist.get_rank())
    idx = torch.rand(tokens, sizes.experts).argsort(1)[:, : sizes.top_k].contiguous()
    return torch.randn(tokens, sizes.hidden), idx, torch.rand(tokens, sizes.top_k)


def exchanged(exchange: Any, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """dispatch, an expert that costs nothing, combine."""
    received = seam.dispatch(exchange, x, idx, weights)
    assert received.weights is not None
    return seam.combine(exchange, received.rows * received.weights.sum(1, keepdim=True), received.handle)


def measured(exchanges: dict[str, Any], sizes: Sizes, links: Links) -> dict[str, dict[str, float]]:
    """Per exchange: least seconds of dispatch + combine, bytes that left node 0 by its device's count and by the formula."""
    given = inputs(sizes, sizes.tokens)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    counted = {}
    for _ in range(sizes.repetitions):
        for mode in MODES:
            before = sent_bytes()
            times[mode].append(timed(lambda mode=mode: exchanged(exchanges[mode], *given)))
            counted[mode] = sent_bytes() - before
    layer, fabric = Layer(sizes.experts, sizes.top_k, sizes.hidden, 4, 4), Fabric(dist.get_world_size(), links.width, 1, 1)
    return {mode: {
        "seconds": min(times[mode]), "device_bytes": counted[mode],
        "formula_bytes": slow_bytes(mode, layer, fabric, sizes.tokens) * links.width} for mode in MODES}


def steps(exchanges: dict[str, Any], sizes: Sizes, tokens: int) -> dict[str, Any]:
    """Seconds of a step forward and backward, and forward alone with and without two overlapped micro-batches, by exchange."""
    given = inputs(sizes, tokens)
    plain = min(timed(lambda: trained(exchanges["copy"], given, sizes.layers, 0.0)) for _ in range(2))
    pause = plain / sizes.layers * sizes.compute / (1 - sizes.compute)
    forward = min(timed(lambda: inferred(exchanges["copy"], given, sizes.layers, 0.0)) for _ in range(2))
    rest = forward / sizes.layers * sizes.compute / (1 - sizes.compute)
    found: dict[str, Any] = {mode: {"training": [], "forward": [], "overlapped": []} for mode in MODES}
    with ThreadPoolExecutor(1) as thread:
        for _ in range(sizes.repetitions):
            for mode in MODES:
                one, entry = exchanges[mode], found[mode]
                entry["training"].append(timed(lambda one=one: trained(one, given, sizes.layers, pause)))
                entry["forward"].append(timed(lambda one=one: inferred(one, given, sizes.layers, rest)))
                entry["overlapped"].append(timed(lambda one=one: overlapped(one, given, sizes.layers, rest, thread)))
    return {
        "compute_share": pause * sizes.layers / min(found["copy"]["training"]),
        **{mode: {name: min(values) for name, values in entry.items()} for mode, entry in found.items()}}


def trained(exchange: Any, given: Sequence[torch.Tensor], layers: int, pause: float) -> None:
    """A step: per layer compute and an exchange, then backward through all; `pause` is the compute of a layer, both ways."""
    x, idx, weights = given
    hidden = x.clone().requires_grad_()
    out = hidden
    for _ in range(layers):
        time.sleep(pause / 3)
        out = out + exchanged(exchange, out, idx, weights)
    for _ in range(layers):
        time.sleep(pause * 2 / 3)
    out.sum().backward()


@torch.no_grad()
def inferred(exchange: Any, given: Sequence[torch.Tensor], layers: int, pause: float) -> None:
    """Forward alone."""
    x, idx, weights = given
    for _ in range(layers):
        time.sleep(pause)
        x = x + exchanged(exchange, x, idx, weights)


def overlapped(exchange: Any, given: Sequence[torch.Tensor], layers: int, pause: float, thread: ThreadPoolExecutor) -> None:
    """Forward in two halves: one thread makes every exchange, in the same order on all ranks, while the other half computes."""
    halves = list(zip(*(value.tensor_split(2) for value in given), strict=True))

    @torch.no_grad()
    def half(part: Sequence[torch.Tensor]) -> torch.Tensor:
        return exchanged(exchange, *part)

    waiting: list[Any] = [None, None]
    for _ in range(layers):
        for number, part in enumerate(halves):
            if waiting[number] is not None:
                waiting[number].result()
            time.sleep(pause / 2)
            waiting[number] = thread.submit(half, part)
    for future in waiting:
        future.result()


def timed(work: Callable[[], object]) -> float:
    """Seconds until the slowest rank is through."""
    dist.barrier()
    start = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def figures(found: dict[str, Any]) -> dict[str, float]:
    """The keys that are tracked."""
    one, step = found["exchange"], found["step"]
    worst = max((one[mode]["device_bytes"] / one[mode]["formula_bytes"] for mode in ("copy", "flat", "hierarchical")),
                key=lambda ratio: abs(ratio - 1))
    return {
        "bytes_flat_copy_over_hier": one["copy"]["device_bytes"] / one["hierarchical"]["device_bytes"],
        "bytes_vs_formula": worst,
        "time_copy_over_hier": one["copy"]["seconds"] / one["hierarchical"]["seconds"],
        "time_dedup_over_hier": one["flat"]["seconds"] / one["hierarchical"]["seconds"],
        "step_gain": step["copy"]["training"] / step["hierarchical"]["training"] - 1,
        "step_gain_overlapped": step["copy"]["overlapped"] / step["hierarchical"]["overlapped"] - 1,
        "compute_share": step["compute_share"],
    }


def shown(found: dict[str, Any], tracked: dict[str, float], sizes: Sizes, links: Links) -> str:
    """The report."""
    lines = [f"{links.nodes} nodes of {links.width} ranks, slow {links.slow_mbit} and fast {links.fast_mbit} Mbit/s a node, "
             f"E={sizes.experts} K={sizes.top_k} H={sizes.hidden} T={sizes.tokens}; least of {sizes.repetitions}", "",
             "exchange        MB over slow link   of formula   dispatch+combine s   training step s   forward s   overlapped s"]
    for mode in MODES:
        one, step = found["exchange"][mode], found["step"][mode]
        lines.append(
            f"{mode:14s}{one['device_bytes'] / 1e6:14.2f}{one['device_bytes'] / one['formula_bytes']:15.3f}"
            f"{one['seconds']:18.3f}{step['training']:20.3f}{step['forward']:14.3f}{step['overlapped']:13.3f}")
    decode = found["decode"]
    lines += ["", f"decode-shaped step ({ROW} tokens a rank), forward s: " + ", ".join(
        f"{mode} {decode[mode]['forward']:.3f} (overlapped {decode[mode]['overlapped']:.3f})" for mode in MODES)]
    ratio, share = tracked["time_copy_over_hier"], tracked["compute_share"]
    need = 0.2857 / (1 - 1 / ratio) if ratio > 1 else float("inf")
    lines += ["", f"Compute is emulated by sleeping: {share:.0%} of the copy step.",
              f"A gain of 40 % over copy needs {need:.0%} of its step in exchanges at this ratio of {ratio:.1f}, and a "
              "baseline that does not overlap them." if need <= 1 else "At this ratio no share of exchanges gives 40 %.",
              "No claim about GPUs, NVLink, EFA or rollout throughput follows from these figures."]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fabric", description="Exchanges of tokens on an emulated fabric.")
    for name, default in dict(nodes=2, width=2, slow=222, fast=2000, experts=64, top_k=8, hidden=1024, tokens=512, layers=3,
                              repetitions=5).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--compute", type=float, default=0.5, help="share of the copy step that is compute (sleep)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Set up, measure, take down. Exit code 3 where links cannot be emulated."""
    given = arguments()
    if why := missing():
        print(f"nothing was measured: {why}", file=sys.stderr)
        return 3
    links = Links(given.nodes, given.width, given.slow, given.fast, f"sf{os.getpid()}")
    sizes = Sizes(given.experts, given.top_k, given.hidden, given.tokens, given.layers, given.repetitions, given.compute)
    found = on_ranks(links, rank_main, sizes)
    tracked = figures(found)
    print(shown(found, tracked, sizes, links))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(tracked | {"links": asdict(links), "sizes": asdict(sizes), "all": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
