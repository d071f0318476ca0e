"""A relabelled model on an emulated fabric: bytes that leave the nodes, experts in blocks against experts placed by routes.

    python -m benchmarks.fabric_placed [--nodes 4] [--slow 222] [--fast 2000] [--routes FILE.npz] [--json FILE]      needs root

Routes are those of benchmarks/fabric_routes.py, which trains a small model for them when there is no file. Experts are placed
by one batch and another one is sent: forward and backward of every layer by `hierarchical`, rows dealt out by cost as the
trainer does. Bytes are those that the nodes' devices count, headers and all; times are TCP's on this machine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks import fabric_routes as study
from benchmarks.fabric import exchanged, timed
from benchmarks.fabric_links import Links, enter, missing, on_ranks, sent_bytes
from benchmarks.record import publish
from services.trainer.parallel import placement
from services.trainer.parallel import route_plans as plans
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.partition import partition
from services.trainer.parallel.topology import topology

Routes = dict[str, list[np.ndarray]]  # by layout: [T, L, K] of each rank


def rank_main(rank: int, links: Links, routes: Routes, experts: int, hidden: int, repetitions: int, pipe: Any) -> None:
    """One rank, in its node's namespace: bytes of all nodes and least seconds, by layout."""
    enter(links.namespace(rank // links.width))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    store: Any = dist.TCPStore(
        links.address(0), 29557, links.nodes * links.width, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=links.nodes * links.width, timeout=timedelta(seconds=300))
    group = dist.group.WORLD
    assert group is not None
    exchange = Hierarchical(topology(group, links.width), experts)
    found: dict[str, tuple[int, float]] = {}
    for layout, of_ranks in routes.items():
        ids_T_L_K = torch.from_numpy(of_ranks[rank].astype(np.int64))

        def step(ids_T_L_K: torch.Tensor = ids_T_L_K) -> None:
            out = torch.zeros(len(ids_T_L_K), hidden, requires_grad=True)
            weights = torch.ones(ids_T_L_K.shape[0], ids_T_L_K.shape[2])
            for layer in range(ids_T_L_K.shape[1]):
                out = out + exchanged(exchange, out, ids_T_L_K[:, layer].contiguous(), weights)
            out.sum().backward()

        dist.barrier()
        before = sent_bytes()
        times = [timed(step) for _ in range(repetitions)]
        sent = torch.tensor([(sent_bytes() - before) // repetitions if rank % links.width == 0 else 0])
        dist.all_reduce(sent)
        found[layout] = int(sent), min(times)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def laid_out(given: dict[str, Any], links: Links) -> tuple[Routes, dict[str, float]]:
    """Routes of a batch under both layouts, by rank, and the busiest rank over the mean of each."""
    experts, ranks = int(given["experts"]), links.nodes * links.width
    first, other = study.batch(given["routes"][::2], 0), study.batch(given["routes"][1::2], 1)
    order = np.array(placement.planned(first.routes, experts, ranks, links.width).order)
    label_L_E = np.argsort(order, 1)
    layers, parts = np.arange(len(order))[:, None], partition(other.costs, ranks)
    routes: Routes = {}
    load: dict[str, float] = {}
    for layout, labels in (("blocks", np.tile(np.arange(experts), (len(order), 1))), ("placed", label_L_E)):
        rows = [labels[layers, row] for row in other.routes]
        routes[layout] = [np.concatenate([rows[i] for i in part]) for part in parts]
        blocks = plans.contiguous(1, experts, ranks)[0]
        load[layout] = float(np.mean([
            plans.max_over_mean(plans.load_of(np.concatenate([row[:, layer] for row in rows]), experts), blocks, ranks)
            for layer in range(len(order))]))
    return routes, load


def main() -> int:
    """Routes, set up, send, take down. Exit code 3 where links cannot be emulated."""
    parser = study.parser("fabric_placed", "Bytes between nodes of a relabelled model.")
    for name, default in dict(nodes=4, width=2, slow=222, fast=2000, hidden=256, repetitions=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if why := missing():
        print(f"nothing was measured: {why}", file=sys.stderr)
        return 3
    links = Links(given.nodes, given.width, given.slow, given.fast, f"sp{os.getpid()}")
    recorded = study.routes_of(given)
    routes, load = laid_out(recorded, links)
    found = on_ranks(links, rank_main, routes, int(recorded["experts"]), given.hidden, given.repetitions)
    figures = {
        "bytes_static_over_planned": found["blocks"][0] / found["placed"][0],
        "max_over_mean_load": load["placed"], "max_over_mean_load_static": load["blocks"],
        "time_static_over_planned": found["blocks"][1] / found["placed"][1], "links": asdict(links)}
    rows = [(layout, f"{sent / 1e6:.1f}", f"{seconds:.2f}", f"{load[layout]:.3f}") for layout, (sent, seconds) in found.items()]
    publish(f"A step of the exchanges, {links.nodes} nodes of {links.width} ranks, H={given.hidden}", (
        "experts", "MB that leave nodes", "s", "load max / mean"), rows, figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
