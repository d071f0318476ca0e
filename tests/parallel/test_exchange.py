"""Exchanges of tokens on one, two and four ranks: integer inputs give the bits of a dense reference in float64, and more."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import distributed as dist

from services.trainer.parallel.baselines import AllGather, Copies
from services.trainer.parallel.exchange import ExpertParallel
from services.trainer.parallel.flat import Flat
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.topology import topology
from slipstream.errors import ConfigError, InvalidInput
from tests.parallel import exchange_cases as cases
from tests.parallel import ranks

SHAPE = cases.Shape()
BASELINES = ("copy", "all_gather")
WORLDS = {1: ("flat", "hier1"), 2: ("flat", "hier1", "hier2", "copy", "all_gather"),
          4: ("flat", "hier1", "hier2", "hier4", "copy", "all_gather")}


def made(name: str) -> ExpertParallel:
    """hierN: N ranks a node."""
    group = dist.group.WORLD
    assert group is not None
    if name.startswith("hier"):
        return Hierarchical(topology(group, int(name[4:])), SHAPE.experts)
    return {"flat": Flat, "copy": Copies, "all_gather": AllGather}[name](group, SHAPE.experts)


def everything(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """In a rank: the contract of each exchange, and what is asked of ours beyond it."""
    found = {}
    for name in names:
        exchange = made(name)
        found[name] = cases.suite(exchange, SHAPE, name not in BASELINES) | {"repeats": cases.repeats(exchange, SHAPE)}
        for dtype in (torch.float64, torch.bfloat16):
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            shape = cases.Shape(dtype=dtype, weights=wide)
            found[name][f"exact {dtype}"] = cases.exact(exchange, "masked", shape)
    return found | {"canonical": canonical(), "refused": refused()}


def canonical() -> dict[str, str]:
    """On ordinary numbers flat and hierarchical differ in bits, and do not in the canonical order."""
    group = dist.group.WORLD
    assert group is not None
    if (size := dist.get_world_size()) < 4:
        return {}
    places = topology(group, 2)
    given = cases.inputs("random", dist.get_rank(), size, SHAPE, integers=False)
    hierarchical = cases.block(Hierarchical(places, SHAPE.experts, canonical=True), given, SHAPE)
    flat, plain = (cases.block(Flat(group, SHAPE.experts, nodes=n), given, SHAPE) for n in (2, 1))
    same = all(torch.equal(getattr(flat, n), getattr(hierarchical, n)) for n in ("out", "dx", "dw", "ds"))
    rows = [e.dispatch(given.x, given.idx, given.weights) for e in (
        Flat(group, SHAPE.experts), Hierarchical(places, SHAPE.experts, canonical=True))]
    return {
        "canonical": "" if same else "bits differ", "plain": "differs" if not torch.equal(plain.out, flat.out) else "",
        "rows": "" if all(torch.equal(getattr(rows[0], n), getattr(rows[1], n)) for n in ("rows", "idx", "weights"))
        else "rows come in another order"}


def refused() -> dict[str, str]:
    """Messages of what is refused."""
    group, found = dist.group.WORLD, {}
    assert group is not None
    given = cases.inputs("random", dist.get_rank(), dist.get_world_size(), SHAPE)
    wrong = {
        "id": (given.x, given.idx + SHAPE.experts, given.weights), "dtype": (given.x, given.idx.int(), given.weights),
        "shape": (given.x[1:], given.idx, given.weights), "nothing": (given.x, None, None)}
    for name, arguments in wrong.items():
        try:
            Flat(group, SHAPE.experts).dispatch(*arguments)
        except InvalidInput as error:
            found[name] = error.message
    for name, make in {"experts": lambda: Flat(group, 7), "width": lambda: topology(group, 3)}.items():
        try:
            make()
        except (InvalidInput, ConfigError) as error:
            found[name] = error.message
    return found


@cache
def results(size: int) -> list[dict[str, dict[str, str]]]:
    return ranks.run(size, everything, WORLDS[size])


@pytest.mark.slow
@pytest.mark.parametrize(("size", "name"), [
    pytest.param(size, name, marks=[] if size == 4 else [pytest.mark.nightly])
    for size, names in WORLDS.items() for name in names])
def test_exchange_keeps_its_contract(size: int, name: str) -> None:
    """Bit-exact results and gradients, adjointness and reusable handles for random, skewed, empty, masked and uneven loads."""
    for rank, found in enumerate(results(size)):
        wrong = {check: message for check, message in found[name].items() if message}
        assert not wrong, f"{name}, rank {rank} of {size}"
        assert len(found[name]) == (18 if name in BASELINES else 25)


@pytest.mark.slow
def test_canonical_order_makes_exchanges_equal_bit_for_bit() -> None:
    """Sums in the order experts → ranks of a node → nodes do not tell which exchange made them; other orders do."""
    found = [result["canonical"] for result in results(4)]
    assert all(f["canonical"] == "" and f["rows"] == "" for f in found)
    assert any(f["plain"] for f in found), "the orders are not distinguishable on this input: the test shows nothing"


@pytest.mark.slow
def test_what_does_not_fit_is_refused_by_name() -> None:
    """Ids, dtypes, shapes, experts that do not divide, nodes that do not: each with what would be right."""
    found = results(4)[0]["refused"]
    assert set(found) == {"id", "dtype", "shape", "nothing", "experts", "width"}
    assert "-1..7" in found["id"] and "int64" in found["dtype"] and "multiple of the ranks" in found["experts"]
    assert "trainer.parallel.ranks_per_node = 3" in found["width"]
