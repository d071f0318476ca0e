"""The optimizer steps of one batch on the policy: forward, backward, clip, AdamW; and the pass before the first of several.

    rows of a part ─► micro-batches ─► log-probabilities, routes replayed ─► loss + routers' losses ─► gradients ─► one step

Axes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.trainer import figures, nonfinite
from services.trainer.algorithms.objective import LossInputs, Objective
from services.trainer.balance import Balance
from services.trainer.expert_load import ExpertLoad
from services.trainer.optimizer import NonFinite
from services.trainer.packing import Microbatch, Row, in_order_of
from services.trainer.ranks import Alone
from services.trainer.route_policy import RoutePolicy
from slipstream import config
from slipstream.errors import InvalidInput


class PolicySteps:
    """Moves the model; owns what watches and steers its forward passes. On many ranks every method is collective."""

    def __init__(
        self, model: Any, optimizer: torch.optim.Optimizer, objective: Objective, run: config.RunFile, ranks: Alone,
    ) -> None:
        self._model, self._optimizer, self._objective, self._run, self._ranks = model, optimizer, objective, run, ranks
        self.score = ranks.scorer(model)
        self._routes = RoutePolicy(model, run, ranks)
        self.load = ExpertLoad(model, ranks)
        self.balance = Balance(model, run.algorithm, self.load, ranks)

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of the targets (with gradient) and entropies: two [M]. Its tokens are known to be the model's."""
        with self._routes.replaying(self._ranks.part(batch)):
            return self.score(batch, entropy_gradient)

    def before(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Before the first of several mini-steps: refuse routes that a later one would stumble over, and ask the policy of now.

        This rank's rows come back with its log-probabilities, when they are the anchor or prove routes, and with its routes,
        when those are to be replayed.
        """
        self._routes.check(rows)
        if self._routes.records or self._run.algorithm.anchor == "recomputed":
            return self._asked(rows)
        return rows

    def take(
        self, parts: Sequence[Sequence[Row]], step: int,
    ) -> tuple[list[figures.MiniStep], list[tuple[int, nonfinite.Skip]]]:
        """One optimizer step on each of `parts`: what those showed that were applied, and which were not, from 1."""
        self._routes.begin(step)
        self.balance.begin([], self.forward)
        self.load.begin()
        applied, skips = [], []
        for number, part in enumerate(parts, 1):
            if not (batches := self._ranks.microbatches(part, self._run.trainer.tokens_per_microbatch)):
                continue
            what = f"batch {step}" if len(parts) == 1 else f"batch {step}, mini-step {number} of {len(parts)}"
            try:
                applied.append(self._step(batches, what, number == 1))
            except NonFinite:
                skips.append((number, nonfinite.search(part, batches, self._loss, self._model, self._ranks)))
        return applied, skips

    def _step(self, batches: Sequence[Microbatch], what: str, first: bool) -> figures.MiniStep:
        """One optimizer step. Raises NonFinite, and InvalidInput, with nothing applied."""
        seen = figures.MiniStep()
        self._routes.expect(batches)
        self.balance.begin(batches, self.forward)
        self.load.begin()
        try:
            for number, batch in enumerate(batches):
                with self._ranks.foreseen(number):
                    self._pass(batch, seen, first)
        except InvalidInput:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        seen.of_all(self._ranks)
        seen.load, seen.balance = self.load.tokens(), self.balance.metrics()
        seen.loss += self.balance.loss(seen.balance)
        seen.grad_norm = self._ranks.clipped_step(
            self._optimizer, self._model, self._run.trainer.max_grad_norm, what, seen.loss)
        return seen

    def _pass(self, batch: Microbatch, seen: figures.MiniStep, first: bool) -> None:
        """Forward and backward of one micro-batch of a step."""
        with self.load.counting(self._ranks.part(batch)), self.balance.watching():
            logprobs_M, entropy_M = self.forward(batch, bool(self._run.algorithm.entropy_coefficient))
        self._routes.examine(batch, logprobs_M, lambda: self.forward(replace(batch, routes=None))[0], first)
        inputs = _loss_inputs(batch, logprobs_M, entropy_M)
        share, routers = self._objective.loss(inputs), self.balance.part(self._ranks.part(batch))
        with self._routes.recomputing(self._ranks.part(batch)):
            ((share + routers) * self._ranks.scale).backward()
        seen.saw(batch, inputs, self._objective.anchor(inputs), share.item())

    def metrics(self, applied: Sequence[figures.MiniStep]) -> figures.Metrics:
        """Routes, expert load and the routers' losses of the batch, of which `applied` are the steps."""
        return {
            **self._routes.metrics(), **self.load.metrics(figures.load_of(applied)),
            **(figures.mean_of([found.balance for found in applied]) or self.balance.metrics())}

    @torch.no_grad()
    def _asked(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with the log-probabilities, and maybe the routes, of a pass over them."""
        parts, of_row = [], dict[int, np.ndarray]()
        batches = self._ranks.microbatches(rows, self._run.trainer.tokens_per_microbatch)
        if not self._routes.records:
            self._routes.expect(batches)
        for batch in batches:
            if self._routes.records:
                logprobs_M, found = self._routes.recorded(replace(batch, routes=None, routed=None), self.score)
                of_row.update(zip(batch.members.tolist(), found, strict=False))  # an idle one has none
            else:
                logprobs_M, _ = self.forward(batch)
            parts.append(logprobs_M.cpu().numpy())
        return [
            replace(row, proximal=proximal, routes=of_row.get(i, row.routes))
            for i, (row, proximal) in enumerate(zip(rows, in_order_of(rows, batches, parts), strict=True))]

    def _loss(self, batch: Microbatch) -> torch.Tensor:
        """A micro-batch's part of the step's loss, alone."""
        with self.balance.watching():
            found = self.forward(batch, bool(self._run.algorithm.entropy_coefficient))
        return self._objective.loss(_loss_inputs(batch, *found)) + self.balance.part(self._ranks.part(batch))


def _loss_inputs(batch: Microbatch, logprobs_M: torch.Tensor, entropy_M: torch.Tensor) -> LossInputs:
    def like(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(logprobs_M)

    device = logprobs_M.device
    return LossInputs(
        logprobs_M, entropy_M, like(batch.behaviour), like(batch.advantages), like(batch.weights),
        torch.from_numpy(batch.rows).to(device), torch.from_numpy(batch.lags).to(device),
        None if batch.reference is None else like(batch.reference), None if batch.proximal is None else like(batch.proximal))
