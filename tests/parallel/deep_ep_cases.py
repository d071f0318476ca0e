"""The contract of the DeepEP adapter, run on the ranks of a world: the stand-in on gloo, the module itself on GPUs."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from torch import distributed as dist

from services.trainer.parallel.deep_ep_checks import Demand
from slipstream.errors import InvalidInput
from tests.parallel import exchange_cases as cases

STAND_IN = Path(__file__).parent / "stand_in"
ADAPTER = "services.trainer.parallel.deep_ep"
MOST = 32  # C


def shape() -> cases.Shape:
    """Of the layer under test."""
    device = "cpu" if dist.get_backend() == "gloo" else f"cuda:{torch.cuda.current_device()}"
    return cases.Shape(experts=8, top_k=3, hidden=256, dtype=torch.bfloat16, device=device)


def demand() -> Demand:
    return Demand(
        experts=8, top_k=3, hidden=256, ranks=dist.get_world_size(), ranks_per_node=int(os.environ["RANKS_PER_NODE"]),
        max_tokens=MOST)


def contract(source: str = "") -> dict[str, str]:
    """On a rank: every check, by name. `source` replaces the adapter's own."""
    adapter = load(source)
    group = dist.group.WORLD
    assert group is not None
    layer, device = shape(), torch.device(shape().device)
    exchange = adapter.DeepEP(group, demand(), device)
    found = cases.suite(exchange, layer)
    small = adapter.DeepEP(group, replace(demand(), max_tokens=8), device)
    found["chunked"] = cases.chunked(small, layer, 8)
    found |= refused(exchange, small, layer)
    narrow = replace(layer, hidden=200)
    padded = adapter.DeepEP(group, replace(demand(), hidden=200, pad_hidden=True), device)
    found["padded"] = cases.exact(padded, "empty_rank", narrow)
    found["repeats"] = cases.repeats(exchange, layer)
    found["cached"] = cached(exchange, layer)
    found["float64 gradients of weights"] = cases.exact(exchange, "random", replace(layer, weights=torch.float64))
    for made in (exchange, small, padded):
        made.close()
    found["closed"] = closed(exchange, layer)
    return found


def cached(exchange: cases.ExpertParallel, layer: cases.Shape) -> str:
    """The way back is the way there: a backward pass plans nothing anew, which would cost time and may take another order."""
    buffer, planned = exchange._buffer, []  # pyright: ignore[reportAttributeAccessIssue]
    dispatch = buffer.dispatch

    def looked(*arguments: object, **options: object) -> object:
        planned.append(options.get("handle") is None)
        return dispatch(*arguments, **options)

    buffer.dispatch = looked
    try:
        cases.block(exchange, cases.inputs("random", dist.get_rank(), dist.get_world_size(), layer), layer)
    finally:
        buffer.dispatch = dispatch
    return "" if planned == [True, False] else f"dispatches that planned anew: {planned}"


def refused(exchange: cases.ExpertParallel, small: cases.ExpertParallel, layer: cases.Shape) -> dict[str, str]:
    """What must not reach the library."""
    given = cases.inputs("random", dist.get_rank(), dist.get_world_size(), layer)
    wrong = {
        "float32 is refused": (exchange, given.x.float(), "bfloat16"),
        "too many tokens are refused": (small, given.x, "exceed trainer.parallel.max_tokens = 8")}
    found = {}
    for name, (who, x, message) in wrong.items():
        try:
            who.dispatch(x, given.idx, given.weights)
            found[name] = "it was not"
        except InvalidInput as error:
            found[name] = "" if message in error.message else error.message
    return found


def closed(exchange: cases.ExpertParallel, layer: cases.Shape) -> str:
    """After close the buffer is gone, on all ranks."""
    given = cases.inputs("random", dist.get_rank(), dist.get_world_size(), layer)
    try:
        exchange.dispatch(given.x, given.idx, given.weights)
    except Exception:
        return ""
    return "the buffer still works"


def load(source: str) -> ModuleType:
    """The adapter as it is, or from a changed source."""
    if dist.get_backend() == "gloo" and str(STAND_IN) not in sys.path:
        sys.path.insert(0, str(STAND_IN))
    if not source:
        return importlib.import_module(ADAPTER)
    changed = ModuleType(ADAPTER)
    sys.modules[ADAPTER] = changed
    exec(compile(source, ADAPTER, "exec"), changed.__dict__)
    return changed
