"""The ranks of trainer.parallel, as a step sees them: see services/trainer/ranks.py. Every method is collective.

    rank = (share, context part, tensor part), the last running fastest; the ranks of a share have the same rows

Small things travel on the host, through the gloo backend that the default group has beside NCCL.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from services.trainer import packed_attention
from services.trainer.batches import read_routes
from services.trainer.packing import Fill, Microbatch, Row, microbatches
from services.trainer.parallel import build, context, mesh
from services.trainer.parallel.partition import cost, partition
from services.trainer.parallel.scorer import SpreadScorer
from services.trainer.ranks import Alone, Score, idle
from slipstream import config
from slipstream.errors import SlipstreamError
from slipstream.objects import open_store
from slipstream.protos.types.v1 import sample_pb2

T = TypeVar("T")


class World(Alone):
    """All ranks that torchrun started. They meet when the first model is asked for."""

    context: context.Context
    background: dist.ProcessGroup  # see mesh.background

    def __init__(self, run: config.RunFile) -> None:
        super().__init__(run)
        settings = run.trainer.parallel
        self._settings, self._models, self._hidden = settings, 0, 1
        self._exchanges: list[Any] = []
        self.copies = settings.tensor * settings.context  # ranks of a share
        self.shares, self.scale = settings.ranks // self.copies, settings.ranks // settings.tensor

    def built(self, settings: config.Model, prepare: Callable[..., Any] = lambda model, _: model) -> tuple[Any, Any]:
        """`prepare` gets a model without memory where none is needed: see build.py."""
        self._join()

        def prepared(whole: Any, tokenizer: Any) -> Any:
            context.fits(whole, self._settings)
            return prepare(whole, tokenizer)

        found = build.spread(self.run, settings, self.device, prepared)
        mesh.met(self.background, self._settings)
        self._exchanges.append(found.exchanges)
        self._offload.model(found.model)
        self._hidden = self._hidden if self._models > 1 else int(found.model.config.get_text_config().hidden_size)
        return self.context.attach(packed_attention.attach(found.model) if self.packs else found.model), found.tokenizer

    def _join(self) -> None:
        self._models += 1
        if self._models == 1:
            self.device = mesh.join(self._settings)
            self.background = mesh.background(self._settings)
            self.rank = dist.get_rank()
            self.share = self.rank // self.copies
            self.context = context.Context(self._settings)

    def completed(self, module: Any) -> nn.Module:
        if self._settings.ranks > self._settings.tensor:
            fully_shard(module, mesh=module.backbone._mesh_manager.get_mesh("fsdp"))
        return module

    def scorer(self, model: Any) -> Score:
        if self.packs:
            packed_attention.verify(model)
            mesh.reshard(model)
        return SpreadScorer(model, self.context, self.device)

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
        optimizer = mesh.optimizer(model, self.run.trainer, learning_rate)
        self._offload.trained(model, optimizer)
        return optimizer

    def clipped_step(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float, what: str, loss: float = 0.0,
    ) -> float:
        self._add_up(model)
        return mesh.clipped_step(optimizer, model, max_norm, what, loss)

    def _add_up(self, model: nn.Module) -> None:
        """What FSDP does with gradients, for parameters that every rank has whole: those of an adapter."""
        if self.scale == 1:
            return
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(grad)
                parameter.grad = grad.div_(self.scale)

    def led(self, work: Callable[[Callable[[str], Fill]], list[Row]], fills: Mapping[str, Fill]) -> list[Row]:
        if self.rank:
            return self._followed(fills)

        def filled(name: str) -> Fill:
            def fill(rows: list[Row]) -> list[Row]:
                self.told(name)
                return self._filled(fills[name], rows)

            return fill

        try:
            found = work(filled)
        except SlipstreamError as error:
            self.told(error)
            raise
        self.told(None)
        return found

    def _followed(self, fills: Mapping[str, Fill]) -> list[Row]:
        while (heard := self.told(None)) is not None:
            if isinstance(heard, SlipstreamError):
                raise heard
            self._filled(fills[heard], [])
        return []

    def _filled(self, fill: Fill, rows: list[Row]) -> list[Row]:
        """Each rank fills its own; the rows of rank 0 come back whole, in their order. Routes stay where they are."""
        parts = self._parts(rows)
        mine = self._scattered([[replace(rows[i], routes=None) for i in part] for part in parts])
        found = list(rows)
        for part, came in zip(parts, self.gathered(fill(mine)), strict=False):
            for i, row in zip(part, came, strict=True):
                found[i] = replace(row, routes=rows[i].routes)
        return found

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        error: SlipstreamError | None = None
        try:
            yield
        except SlipstreamError as raised:
            error = raised
        found = next((e for e in self.heard(error) if e is not None), None)
        if found is not None:
            raise found

    def told(self, value: T) -> T:
        told: list[Any] = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def heard(self, value: T) -> list[T]:
        found: list[Any] = [None] * self._settings.ranks
        dist.all_gather_object(found, value)
        return found

    def anywhere(self, here: bool) -> bool:
        there = torch.tensor([int(here)])
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        return bool(there)

    def shared(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Routes that lie in the object store are read by the rank that trains the row, and by no other."""
        mine = self._scattered([[rows[i] for i in part] for part in self._parts(rows)])
        if not self.run.algorithm.replays_sampler:
            return mine
        with self.together():
            mine = asyncio.run(self._with_routes(mine))
        return mine

    async def _with_routes(self, rows: list[Row]) -> list[Row]:
        objects = self.run.objects
        far = [i for i, row in enumerate(rows) if row.routes is None and row.routes_ref]
        wanted = [
            (sample_pb2.Routes.FromString(rows[i].routes_ref), "draw {}, sample {}, segment {}".format(*rows[i].origin))
            for i in far]
        async with open_store(self.run.objects_url, objects.endpoint, objects.region) as store:
            found = dict(zip(far, await read_routes(store, wanted), strict=True))
        return [replace(row, routes=found.get(i, row.routes)) for i, row in enumerate(rows)]

    def _parts(self, rows: Sequence[Row]) -> list[list[int]]:
        return partition([cost(len(row.inputs), self._hidden) for row in rows], self.shares)

    def _scattered(self, parts: Sequence[list[Row]]) -> list[Row]:
        received: list[Any] = [None]
        given = [parts[rank // self.copies] for rank in range(self._settings.ranks)] if self.rank == 0 else None
        dist.scatter_object_list(received, given, src=0)
        return received[0]

    def microbatches(self, rows: Sequence[Row], tokens: int) -> list[Microbatch]:
        batches = microbatches(rows, tokens * self._settings.context, self.packs)
        most = torch.tensor([len(batches)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return batches + [idle()] * (int(most) - len(batches))

    def foresee(self, layers: Sequence[Any], batches: Sequence[Microbatch]) -> None:
        policy = self._exchanges[0]
        policy.known.forget()
        if batches and self._settings.plan_routes and policy.foresee:
            policy.known.foresee(layers, [self.part(batch) for batch in batches], mesh.width(self._settings))

    def foreseen(self, number: int | None) -> contextlib.AbstractContextManager[None]:
        return self._exchanges[0].known.during(number)

    def part(self, batch: Microbatch) -> Microbatch:
        return self.context.part(batch).batch

    def total(self, value: float) -> float:
        total = torch.tensor([value if self.rank % self.copies == 0 else 0.0], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def summed(self, counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = self.rank % self._settings.tensor == 0
        found = [(c if own else torch.zeros_like(c)).to("cpu", copy=True) for c in counts]
        for tensor in found:
            dist.all_reduce(tensor)
        return [f.to(c.device) for f, c in zip(found, counts, strict=True)]

    def gathered(self, value: T) -> list[T]:
        found: list[Any] | None = [None] * self._settings.ranks if self.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return (found or [])[:: self.copies]

    def close(self) -> None:
        for exchanges in self._exchanges:
            exchanges.close()
