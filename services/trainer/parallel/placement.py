"""Experts where they belong: the same model with other labels of its experts, so that ranks and nodes share the work evenly.

    model, texts ─► routes of every (token, layer) ─► route_plans: a node and a rank for each expert ─► experts and the rows of
    routers that score them, reordered ─► proof ─► OUT, an ordinary Hugging Face directory

    python -m services.trainer.parallel.placement MODEL OUT --texts FILE --ranks 16 --ranks-per-node 8

A rank has a block of neighbouring experts of each layer, and which those are is a matter of labels: experts that change places
together with their rows in the router compute the same function. So nothing moves while a run goes on, and nobody has to know:
trainer, checkpoints, publication and engines take OUT as any model. Do it before a run starts, with texts like those that it
will train on; routes of samples name the new labels.

The model is loaded whole, on the CPU. Families whose routers choose groups first (deepseek_v3) tie labels to groups: the proof
fails for them, and they are refused.

Axes: T tokens of a text, L layers, K experts per token, E experts of a layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.expert_load import number_of
from services.trainer.parallel import route_plans as plans
from services.trainer.parallel.partition import cost, partition
from services.trainer.routes import RouteReplay
from slipstream import config
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.model import build, experts_of

PROVEN = 0.99  # of (token, layer) pairs that take the same experts afterwards: near ties may fall otherwise
ERROR = {torch.bfloat16: 0.05, torch.float16: 0.02}  # relative, of logits; sums go in another order
EXACT = 1e-4


@dataclass(frozen=True, slots=True)
class Placed:
    """What a placement is expected to do, on the texts that it was made from."""

    ranks: int
    ranks_per_node: int
    load_before: float  # busiest rank over the mean, the mean of the layers
    load_after: float
    copies_saved: float  # copies between nodes before, over those after
    tokens: int
    order: list[list[int]]  # [L][E]: the former label of each expert


@torch.no_grad()
def routes_of(model: Any, rows: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The experts that the model takes for each text, int64 [T, L, K]. Raises ConfigError as RouteReplay."""
    replay, found = RouteReplay(model), []
    for ids in rows:
        with replay.recording() as layers:
            model(input_ids=ids[None], use_cache=False)
        found.append(torch.stack(layers, 1).cpu().numpy())
    return found


def planned(routes: Sequence[np.ndarray], experts: int, ranks: int, width: int) -> Placed:
    """Labels for these routes. Rows lie where the trainer would put them, by cost. Raises ConfigError for odd divisions."""
    if experts % ranks or ranks % width:
        raise ConfigError(
            f"{experts} experts on {ranks} ranks, {width} to a node: ranks must divide the experts, and nodes be whole")
    nodes, layers = ranks // width, routes[0].shape[1]
    home_R = np.zeros(len(routes), int)
    for rank, part in enumerate(partition([cost(len(row), 1024) for row in routes], ranks)):
        home_R[part] = rank // width
    home_P = np.repeat(home_R, [len(row) for row in routes])
    before = plans.contiguous(layers, experts, ranks)
    flat = [np.concatenate([row[:, layer] for row in routes]) for layer in range(layers)]
    loads = [plans.load_of(ids, experts) for ids in flat]
    nodes_L_E = [plans.placed_on_nodes(ids, home_P, before[0] // width, nodes) for ids in flat]
    after = np.stack([plans.placed_on_ranks(load_E, n, width) for load_E, n in zip(loads, nodes_L_E, strict=True)])
    copies = [plans.slow_copies(np.stack([plans.node_hits(row, place // width, nodes) for row in routes]), home_R)
              for place in (before, after)]
    even = [float(np.mean([plans.max_over_mean(load_E, rank_E, ranks) for load_E, rank_E in zip(loads, place, strict=True)]))
            for place in (before, after)]
    return Placed(
        ranks, width, even[0], even[1], copies[0] / max(1, copies[1]), len(home_P),
        [np.argsort(rank_E, kind="stable").tolist() for rank_E in after])


@torch.no_grad()
def reorder(model: Any, order: Sequence[Sequence[int]]) -> None:
    """Give each layer's experts, and what scores them, these places: [L][E] of former labels.

    What of the block around a layer's experts is as long as there are experts is one row an expert; `prove` tells whether.
    """
    for experts, places in zip(experts_of(model), order, strict=True):
        name = next(n for n, module in model.named_modules() if module is experts)
        block = model.get_submodule(name.rpartition(".")[0])
        for path, tensor in [*block.named_parameters(), *block.named_buffers()]:
            if tensor.ndim and len(tensor) == len(places) and "shared" not in path:
                tensor.copy_(tensor[torch.tensor(places, device=tensor.device)])


@torch.no_grad()
def prove(model: Any, order: Sequence[Sequence[int]], rows: Sequence[torch.Tensor]) -> None:
    """Reorder, and look: the same logits, by the same experts under new labels. Raises ConfigError that names the family."""
    before, logits = routes_of(model, rows), [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in rows]
    reorder(model, order)
    label_L_E = np.argsort(np.array(order), 1)
    same, error = [], 0.0
    for ids, was, said, now in zip(rows, before, logits, routes_of(model, rows), strict=True):
        expected = np.sort(label_L_E[np.arange(was.shape[1])[:, None], was], -1)
        same.append((np.sort(now, -1) == expected).all(-1).mean())
        found = model(input_ids=ids[None], use_cache=False).logits[0].float()
        error = max(error, float(((found - said).norm(dim=-1) / said.norm(dim=-1).clamp_min(1e-30)).median()))
    if np.mean(same) < PROVEN or not error < ERROR.get(model.dtype, EXACT):
        raise ConfigError(
            f"{type(model).__name__} is another model with its experts in other places ({np.mean(same):.0%} of tokens take the "
            f"same ones, logits are {error:.1e} off): its router ties labels to something else; train it as it is")


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.parallel.placement", description="Relabel experts for trainer.parallel.")
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("out", type=Path, help="directory that is made")
    parser.add_argument("--texts", type=Path, required=True, help="a text a line, like those that the run will train on")
    parser.add_argument("--ranks", type=int, required=True, help="trainer.parallel.experts")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text that are looked at")
    parser.add_argument("--dtype", default="bfloat16", help="as model.dtype")
    given = parser.parse_args(arguments)
    try:
        print(placed(given.model, given.out, given.texts, given.ranks, given.ranks_per_node, given.length, given.dtype))
    except SlipstreamError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


def placed(path: str, out: Path, texts: Path, ranks: int, width: int, length: int = 2048, dtype: str = "bfloat16") -> str:
    """Load, plan, prove, write. Returns what to tell the user. Raises ConfigError with nothing written."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: name a new directory")
    built, tokenizer = build(config.Model(path=path, dtype=dtype), 0)  # pyright: ignore
    model: Any = built.eval()
    lines = [line for line in texts.read_text().splitlines() if line.strip()]
    rows = [torch.tensor(tokenizer(line)["input_ids"][:length]) for line in lines]
    if not (rows := [row for row in rows if len(row)]):
        raise ConfigError(f"{texts} has no text: give one a line")
    found = planned(routes_of(model, rows), number_of(experts_of(model)[0]), ranks, width)
    prove(model, found.order, rows[:4])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "placement.json").write_text(json.dumps(asdict(found)) + "\n")
    return (
        f"{out}: on {found.tokens} tokens the busiest of {ranks} ranks has {found.load_after:.2f} of the mean (before: "
        f"{found.load_before:.2f}), and {found.copies_saved:.2f} times fewer copies cross between nodes of {width}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
