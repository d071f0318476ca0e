"""When the sampler's routes are replayed, and whether they are the right ones.

`algorithm.route_replay`: auto replays what samples carry, as far as the model can (else it says so, once, and trains without);
sampler needs routes of every row and a model that can; none ignores them. What came without routes, such as the warm-up's rows
and padding, routes itself.

Routes that are off by a token or a layer look like any others, but they make the model say something else. So every
`algorithm.route_check_every` steps, at the first step of a process, and whenever many routes have flipped, a micro-batch is
also run without replay: with the right routes the trainer is closer to the sampler's log-probabilities than with its own, or as
close (measured: 0.008 against 0.017 nats; shifted by a token 0.7, layers swapped 0.9). If it is farther, the step is refused,
in every mode, before anything is applied: going on without replay would hide a broken sampler.

Replaying the trainer's own routes of an earlier pass (R2) is not offered: with one optimizer step per batch that earlier pass
is the pass itself.

Axes: M trained tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from services.trainer.packing import Microbatch
from services.trainer.ranks import Alone
from services.trainer.routes import RouteReplay
from slipstream import config, logs
from slipstream.errors import ConfigError, InvalidInput

FEW = 32  # trained tokens; fewer say nothing
MANY_FLIPS = 0.25  # share of flipped routes that is looked into at once
# Largest gap with replay, in nats, from the gap without: room for chance where both are only the age of the policy.
FACTOR, FLOOR = 1.5, 0.01

log = logs.get("trainer.routes")


def unreplayed_attention(model: Any, context: int) -> str:
    """A sentence when attention chooses its tokens, too, within `context` tokens; else empty."""
    chosen = getattr(model.config.get_text_config(), "index_topk", None)
    if not chosen or chosen >= context:
        return ""
    return (
        f"{type(model).__name__} also chooses the {chosen} tokens that attention sees (index_topk) of rollout.context = "
        f"{context}, and that choice is not replayed; lower rollout.context to {chosen}")


class RoutePolicy:
    """Route replay in one model as the run file wants it. Raises ConfigError when it is required and cannot be had."""

    def __init__(self, model: Any, run: config.RunFile, ranks: Alone) -> None:
        self._ranks, self._recompute = ranks, run.trainer.parallel.recompute
        self._model, self._mode, self._every = model, run.algorithm.route_replay, run.algorithm.route_check_every
        if self._mode != "none" and (sparse := unreplayed_attention(model, run.rollout.context)):
            if self._mode == "sampler":
                raise ConfigError(f"algorithm.route_replay = sampler: {sparse}")
            log.warning(sparse)
        self._replay = RouteReplay(model) if self._mode == "sampler" else None
        self._off = self._mode == "none"
        self._checked_once = self._due = self._carried = False
        self._flips = self._compared = 0
        self._gaps: tuple[float, float] | None = None

    def begin(self, batches: Sequence[Microbatch], step: int) -> None:
        """A step begins. Raises InvalidInput when routes are required and a row has none."""
        self._flips = self._compared = 0
        self._gaps, self._due = None, not self._checked_once or step % self._every == 0
        self._carried = self._ranks.anywhere(any(b.routes is not None for b in batches))
        if self._carried:
            self._ready()  # its proofs are forward passes of their own: before anybody counts those of the step
        with self._ranks.together():
            lacking = [b for b in batches if len(b.index) and (b.routed is None or not b.routed[:, 0].all())]
            if self._mode == "sampler" and lacking:
                raise InvalidInput(
                    "algorithm.route_replay = sampler, but a row has no routes: set rollout.capture_routes = true, or "
                    "route_replay = auto, which replays what there is", "NO_ROUTES", field="routes")
            for batch in batches:
                if batch.routes is not None and self._replay is not None:
                    self._replay.check(batch.routes)

    @contextlib.contextmanager
    def replaying(self, batch: Microbatch) -> Iterator[None]:
        """Forward passes of `batch` belong inside. Raises InvalidInput for routes that are not of this model."""
        if (batch.routes is None and not self._carried) or (replay := self._ready()) is None:
            yield
            return
        with self._ranks.together():
            if batch.routes is None or batch.routed is None:
                yield
            else:
                with replay.using(batch.routes, batch.routed):
                    yield

    def recomputing(self, batch: Microbatch) -> contextlib.AbstractContextManager[None]:
        """The backward pass of `batch` belongs inside, after `examine`: it may run layers again, which must choose the same."""
        return self.replaying(batch) if self._recompute else contextlib.nullcontext()

    def _ready(self) -> RouteReplay | None:
        """The replay, made when routes come for the first time; None when they are not replayed."""
        if self._replay is None and not self._off:
            try:
                self._replay = RouteReplay(self._model)
            except ConfigError as error:
                self._off = True
                log.warning(f"samples carry routes, but they are not replayed: {error.message}")
        return None if self._off else self._replay

    def examine(self, batch: Microbatch, logprobs_M: torch.Tensor, without: Callable[[], torch.Tensor]) -> None:
        """After the forward pass of `batch`: count flips and, when it is time, compare with log-probabilities `without` replay.

        Raises InvalidInput when the replayed routes take the trainer away from the sampler.
        """
        if self._off or not self._carried or self._replay is None:
            return
        flips, compared = self._replay.flips() if batch.routes is not None else (0, 0)
        self._flips, self._compared = self._flips + flips, self._compared + compared
        wanted = batch.routes is not None and (self._due or flips > MANY_FLIPS * compared)
        if self._gaps is not None or not self._ranks.anywhere(wanted) or self._ranks.total(len(batch.index)) < FEW:
            return
        fresh = self._ranks.total(float(batch.fresh.sum())) >= FEW
        chosen_M = batch.fresh if fresh else np.ones(len(batch.fresh), bool)
        tokens = self._ranks.total(float(chosen_M.sum()))
        with torch.no_grad():
            gaps = (
                np.abs(found.detach().float().cpu().numpy() - batch.behaviour)[chosen_M] for found in (logprobs_M, without()))
            gap, live = (self._ranks.total(float(gap_M.sum())) / tokens for gap_M in gaps)
        self._gaps, self._checked_once = (gap, live), True
        if gap > FACTOR * live + FLOOR:
            flips, compared = self._counts(flips, compared)
            raise InvalidInput(
                f"with the routes of the samples the trainer is {gap:.3g} nats off the sampler, without them {live:.3g}, and "
                f"{flips / max(compared, 1):.0%} of the routes differ: they are not those of these tokens or layers. Nothing "
                "was applied; repair the sampler, or set algorithm.route_replay = none", "ROUTES_MISALIGNED", field="routes")

    def metrics(self) -> dict[str, float | None]:
        """Of the step so far. route_flip_share: share of replayed (token, layer) pairs where the live router wants another set.
        route_gap, route_gap_live: mean |log pi - log mu| with and without replay, of the tokens of one micro-batch."""
        gap, live = self._gaps or (None, None)
        flips, compared = self._counts(self._flips, self._compared) if self._carried else (0, 0)
        share = flips / compared if compared else None
        return {"route_flip_share": share, "route_gap": gap, "route_gap_live": live}

    def _counts(self, flips: int, compared: int) -> tuple[int, int]:
        """Of all ranks."""
        [counts] = self._ranks.summed([torch.tensor([flips, compared])])
        return int(counts[0]), int(counts[1])
