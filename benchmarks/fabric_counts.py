"""What it is worth to know the counts of every exchange before a step: steps on an emulated fabric, with and without asking.

    python -m benchmarks.fabric_counts [--nodes 2] [--width 2] [--slow 222] [--fast 2000] [--json FILE]     needs root

A step is forward and backward through `--layers` layers of experts that cost nothing, by `flat` and by `hierarchical`, once
asking in every layer how many rows will come, once with the counts of all layers from one all-gather before the step, which is
part of its time. Both send the same rows. Repetitions are interleaved and the least time is shown. TCP between processes adds
about a millisecond for a collective and no distance: figures are about this machine. No claim about GPUs follows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.fabric import Sizes as Layer
from benchmarks.fabric import inputs, timed, trained
from benchmarks.fabric_links import Links, enter, missing, on_ranks
from benchmarks.record import publish
from services.trainer.parallel.flat import Flat
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.known_routes import Splits, counted
from services.trainer.parallel.topology import topology

NAMES = ("flat", "hierarchical")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the step."""

    experts: int
    top_k: int
    hidden: int
    layers: int
    repetitions: int


class Foreseen:
    """An exchange that is told its splits, layer by layer."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.splits = inner, list[Splits]()

    def dispatch(self, x: torch.Tensor, idx: Any = None, weights: Any = None, *, handle: Any = None) -> Any:
        return self._inner.dispatch(x, idx, weights, **({"handle": handle} if handle else {"splits": self.splits.pop()}))

    def combine(self, rows: torch.Tensor, handle: Any, weights: torch.Tensor | None = None) -> Any:
        return self._inner.combine(rows, handle, weights)


def rank_main(rank: int, links: Links, sizes: Sizes, tokens: list[int], pipe: Any) -> None:
    """One rank, in its node's namespace: seconds of a step by number of tokens, exchange, and whether it asks."""
    enter(links.namespace(rank // links.width))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    ranks = links.nodes * links.width
    store = dist.TCPStore(links.address(0), 29556, ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    group = dist.group.WORLD
    assert group is not None
    exchanges = {"flat": Flat(group, sizes.experts), "hierarchical": Hierarchical(topology(group, links.width), sizes.experts)}
    found = {count: measured(exchanges, sizes, links, count) for count in tokens}
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def measured(exchanges: dict[str, Any], sizes: Sizes, links: Links, tokens: int) -> dict[str, dict[str, float]]:
    """Least seconds of a step of `tokens` tokens a rank."""
    given = inputs(Layer(sizes.experts, sizes.top_k, sizes.hidden, tokens, sizes.layers, 1, 0), tokens)
    arms: dict[tuple[str, str], Callable[[], object]] = {}
    for name in NAMES:
        arms[name, "asking"] = lambda name=name: trained(exchanges[name], given, sizes.layers, 0.0)
        arms[name, "foreseen"] = lambda name=name: foreseen(Foreseen(exchanges[name]), given, sizes, links)
    times = {arm: list[float]() for arm in arms}
    for _ in range(sizes.repetitions):
        for arm, step in arms.items():
            times[arm].append(timed(step))
    return {name: {how: min(times[name, how]) for how in ("asking", "foreseen")} for name in NAMES}


def foreseen(exchange: Foreseen, given: tuple[torch.Tensor, ...], sizes: Sizes, links: Links) -> None:
    """Count, tell each other once, and take the step."""
    ranks = links.nodes * links.width
    routes_N_L_K = given[1][:, None].expand(-1, sizes.layers, -1).numpy()
    mine = torch.from_numpy(counted(routes_N_L_K, sizes.experts, ranks, links.nodes))
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    of_layers = torch.stack(gathered, 1).numpy()
    exchange.splits = [Splits(counts[:, :ranks], counts[:, ranks:]) for counts in of_layers]
    trained(exchange, given, sizes.layers, 0.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fabric_counts", description="Counts known before a step.")
    for name, default in dict(
            nodes=2, width=2, slow=222, fast=2000, experts=64, top_k=8, hidden=256, layers=8, repetitions=5).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512], help="of each rank")
    parser.add_argument("--json", default="")
    return parser.parse_args()


def main() -> int:
    """Set up, measure, take down. Exit code 3 where links cannot be emulated."""
    given = arguments()
    if why := missing():
        print(f"nothing was measured: {why}", file=sys.stderr)
        return 3
    links = Links(given.nodes, given.width, given.slow, given.fast, f"sc{os.getpid()}")
    sizes = Sizes(given.experts, given.top_k, given.hidden, given.layers, given.repetitions)
    found = on_ranks(links, rank_main, sizes, given.tokens)
    figures: dict[str, Any] = {"links": asdict(links), "sizes": asdict(sizes)}
    rows = []
    for tokens, of_tokens in found.items():
        for name, times in of_tokens.items():
            saved = (times["asking"] - times["foreseen"]) / sizes.layers * 1000
            figures |= {f"step_gain_{name}_{tokens}_tokens": times["asking"] / times["foreseen"] - 1,
                        f"saved_ms_a_layer_{name}_{tokens}_tokens": saved}
            rows.append((str(tokens), name, f"{times['asking']:.3f}", f"{times['foreseen']:.3f}",
                         f"{times['asking'] / times['foreseen'] - 1:+.1%}", f"{saved:.2f}"))
    publish(f"Steps of {sizes.layers} layers, {links.nodes} nodes of {links.width} ranks, H={sizes.hidden}", (
        "tokens a rank", "exchange", "asking s", "foreseen s", "gain", "saved ms a layer"), rows, figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
