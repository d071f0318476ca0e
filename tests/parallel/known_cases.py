"""Exchanges that are told how many rows will come, on the ranks of a world, beside those that ask."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from services.trainer.learner import Learner
from services.trainer.packing import Group, Member
from services.trainer.parallel.exchange import Received, combine, dispatch
from services.trainer.parallel.flat import Flat
from services.trainer.parallel.hierarchical import Hierarchical
from services.trainer.parallel.known_routes import Splits, counted
from services.trainer.parallel.learner import ShardedLearner
from services.trainer.parallel.topology import topology
from slipstream.errors import InvalidInput
from slipstream.sample import Sample
from tests.parallel import equality_cases
from tests.parallel import exchange_cases as cases

SHAPE = cases.Shape()


def splits(case: str, ranks: int, nodes: int) -> Splits:
    """Of a case's inputs on all ranks."""
    tables = []
    for rank in range(ranks):
        idx = cases.inputs(case, rank, ranks, SHAPE).idx
        wanted = [counted(row[row >= 0].numpy()[None, None], SHAPE.experts, ranks, nodes)[0] for row in idx]
        tables.append(sum(wanted, torch.zeros(ranks + nodes, dtype=torch.int32).numpy()))
    table = torch.tensor([t.tolist() for t in tables]).numpy()
    return Splits(table[:, :ranks], table[:, ranks:])


def layer(exchange: Any, case: str, known: Splits | None) -> list[torch.Tensor]:
    """Rows as they came, results and gradients of ordinary numbers, and how many collectives that took."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given = cases.inputs(case, rank, ranks, SHAPE, integers=False)
    x, weights = given.x.clone().requires_grad_(), given.weights.clone().requires_grad_()
    asked: list[int] = []
    ordinary = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", lambda *a, **k: (asked.append(1), ordinary(*a, **k))[1]):
        received: Received = dispatch(exchange, x, given.idx, weights, known)
        assert received.weights is not None
        local = SHAPE.experts // ranks
        rows = cases.expert(received.rows, received.idx, received.weights, cases.scales(SHAPE)[rank * local :][:local])
        out = combine(exchange, rows, received.handle)
        out.backward(given.grad)
    assert x.grad is not None and weights.grad is not None
    return [received.rows.detach(), received.idx, out.detach(), x.grad, weights.grad, torch.tensor(len(asked))]


def told() -> dict[str, Any]:
    """On a rank: whether bits are equal, collectives of a layer asking and told, by exchange and case; what wrong splits do."""
    group = dist.group.WORLD
    assert group is not None
    ranks, found = dist.get_world_size(), dict[str, Any]()
    exchanges = {"flat": Flat(group, SHAPE.experts), "hierarchical": Hierarchical(topology(group, 2), SHAPE.experts)}
    for name, exchange in exchanges.items():
        for case in cases.CASES:
            known = splits(case, ranks, ranks // 2)
            asking, foreseen = layer(exchange, case, None), layer(exchange, case, known)
            same = all(torch.equal(a, b) for a, b in zip(asking[:-1], foreseen[:-1], strict=True))
            found[f"{name} {case}"] = same, int(asking[-1]), int(foreseen[-1])
        try:  # of other tokens, on all ranks: nobody waits for anybody
            layer(exchange, "random", splits("skewed", ranks, ranks // 2))
        except InvalidInput as error:
            found[f"{name} wrong"] = error.reason
    return found


def stepped(case: str, parallel: dict[str, Any], folder: str) -> dict[str, Any]:
    """On a rank: equality_cases.trained of one learner, and the collectives that carried rows or counts in its second step."""
    asked: list[int] = []
    ordinary = dist.all_to_all_single

    def counting(*arguments: Any, **named: Any) -> Any:
        asked.append(1)
        return ordinary(*arguments, **named)

    learner = ShardedLearner(equality_cases.run(case, parallel, folder))
    with mock.patch.object(dist, "all_to_all_single", counting):
        found = equality_cases.trained(learner, case)
    return found | {"exchanges": len(asked), "again": equality_cases.again(learner, case)}


def pierced(parallel: dict[str, Any]) -> dict[str, Any]:
    """On a rank, or with one process: `stepped` on batches with `holes`."""
    with mock.patch.object(equality_cases, "batch", holes):
        if parallel:
            return stepped("routes", parallel, "")
        return equality_cases.trained(Learner(equality_cases.run("routes", {})), "routes")


def holes(case: str, number: int) -> list[Group]:
    """Of a batch with routes, two samples without: one rank does not know what its micro-batch will send."""
    found = _batch(case, number)
    for group in found[:2]:
        member = group.members[0]
        bare = [dataclasses.replace(segment, routes=None) for segment in member.sample.segments]
        object.__setattr__(group, "members", [Member(0, Sample(bare), member.reward), *group.members[1:]])
    return found


_batch = equality_cases.batch


def broken(parallel: dict[str, Any]) -> tuple[Any, int]:
    """On a rank: who is named when a sample with routes is not finite, and how many steps are skipped after it."""
    learner = ShardedLearner(equality_cases.run("routes", parallel))
    given = equality_cases.batch("routes", 1)
    for group in given:
        for member in group.members:
            tokens = member.sample.segments[0].tokens
            tokens[tokens == 11] = 3
    given[2].members[3].sample.segments[0].tokens[0] = 11
    handle = learner.model.get_input_embeddings().register_forward_hook(equality_cases.broken)
    learner.step(given, 1)
    handle.remove()
    return learner.skip, learner.step(equality_cases.batch("routes", 2), 2)["skipped"]


def steps(jobs: list[tuple[str, dict[str, Any]]], folder: str) -> list[Any]:
    """On a rank: one after the other; a job of no case is a function of this module."""
    named = {"pierced": pierced, "broken": broken}
    return [named[case](parallel) if case in named else stepped(case, parallel, folder) for case, parallel in jobs]
