"""When routes are replayed, whose, and whether they are the right ones.

`algorithm.route_replay`: auto replays what samples carry, as far as the model can (else it says so, once, and trains without);
sampler needs routes of every row and a model that can; trainer replays those that the trainer itself chose in a pass before the
first of several mini-steps (R2), and also needs a model that can; none ignores them. What came without routes, such as the
warm-up's rows and padding, routes itself.

The sampler's (R3) make trainer and sampler one function, and keep it one while the mini-steps move the router. The trainer's
(R2) do the latter alone: they need nothing of the sampler, whose distance stays in the ratio. Both at once would be two answers
to one question; with the sampler's there, those are taken in the pass before the mini-steps, too.

Routes that are off by a token or a layer look like any others, but they make the model say something else. So every
`algorithm.route_check_every` steps, at the first step of a process, and whenever many routes have flipped, a micro-batch is
also run without replay: with the right routes the trainer is closer to the sampler's log-probabilities than with its own, or as
close (measured: 0.008 against 0.017 nats; shifted by a token 0.7, layers swapped 0.9). If it is farther, the step is refused,
in every mode, before anything is applied: going on without replay would hide a broken sampler. Later mini-steps of a batch
only count flips: there the policy has moved, and the weights with it.

The trainer's own are proven at every first mini-step, at no cost: the weights are those that chose them, so hardly a route may
flip and the log-probabilities must be those of the earlier pass, up to what another packing rounds.

Axes: R rows, T positions of a row, L MoE layers, K experts per token, M trained tokens of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from services.trainer.packing import Microbatch, Row
from services.trainer.ranks import Alone
from services.trainer.routes import RouteReplay
from slipstream import config, logs
from slipstream.errors import ConfigError, InvalidInput
from slipstream.model import experts_of

FEW = 32  # trained tokens; fewer say nothing
MANY_FLIPS = 0.25  # share of flipped routes that is looked into at once
# Largest gap with replay, in nats, from the gap without: room for chance where both are only the age of the policy.
FACTOR, FLOOR = 1.5, 0.01
OWN_GAP = 0.05  # nats between two passes of the same weights over the same tokens with the same routes: rounding, in 16 bits

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
            if self._mode != "auto":
                raise ConfigError(f"algorithm.route_replay = {self._mode}: {sparse}")
            log.warning(sparse)
        self._replay = RouteReplay(model) if self._mode in ("sampler", "trainer") else None
        self._off = self._mode == "none"
        self._checked_once = self._due = self._carried = False
        self._flips = self._compared = 0
        self._gaps: tuple[float, float | None] | None = None

    @property
    def records(self) -> bool:
        """Whether the trainer's own routes of a pass before the first mini-step are wanted."""
        return self._mode == "trainer"

    def check(self, rows: Sequence[Row]) -> None:
        """Before the first of several mini-steps, of this rank's rows: raises InvalidInput for what a later one would find."""
        given = [row for row in rows if row.routes is not None]
        if self._mode == "trainer" or self._off:
            return
        if self._ranks.anywhere(bool(given)):
            self._ready()
        with self._ranks.together():
            self._all_there(len(given) == len(rows))
            for row in given if (replay := self._replay) is not None else []:
                assert row.routes is not None and replay is not None
                replay.check(row.routes)
                ordered = np.sort(row.routes, -1)
                if (ordered[..., 1:] == ordered[..., :-1]).any():
                    raise InvalidInput(
                        f"draw {row.origin[0]}, sample {row.origin[1]}: its routes name an expert twice for one token",
                        "ROUTES_EXPERT", field="routes")

    def _all_there(self, there: bool) -> None:
        if self._mode == "sampler" and not there:
            raise InvalidInput(
                "algorithm.route_replay = sampler, but a row has no routes: set rollout.capture_routes = true, or route_replay "
                "= auto, which replays what there is", "NO_ROUTES", field="routes")

    def recorded(
        self, batch: Microbatch, score: Callable[[Microbatch], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Log-probabilities of `batch`, [M], with the routes that the model chooses for itself, and these, [T, L, K] a segment.
        """
        assert self._replay is not None
        with self._replay.recording() as layers:
            logprobs_M, _ = score(batch)
        dtype = np.uint8 if self._replay.experts <= 256 else np.uint16
        routes = torch.stack(layers, 1).cpu().numpy().astype(dtype)
        places = zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True)
        return logprobs_M, [routes[start : start + size].copy() for start, size in places]

    def begin(self, step: int) -> None:
        """A batch begins."""
        self._flips = self._compared = 0
        self._gaps, self._due, self._carried = None, not self._checked_once or step % self._every == 0, False

    def expect(self, batches: Sequence[Microbatch]) -> None:
        """An optimizer step on these micro-batches begins. Raises InvalidInput when routes are required and a row has none."""
        carried = self._ranks.anywhere(any(b.routes is not None for b in batches))
        self._carried = self._carried or carried
        if carried:
            self._ready()  # its proofs are forward passes of their own: before anybody counts those of the step
        with self._ranks.together():
            self._all_there(all(
                b.routed is not None and bool(b.routed.reshape(-1)[b.starts].all()) for b in batches if len(b.index)))
            for batch in batches:
                if batch.routes is not None and self._replay is not None:
                    self._replay.check(batch.routes)
        chosen = self._replay is not None and self._replay.chosen and self._carried
        self._ranks.foresee(experts_of(self._model), batches if chosen else [])

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

    def examine(
        self, batch: Microbatch, logprobs_M: torch.Tensor, without: Callable[[], torch.Tensor], first: bool = True,
    ) -> None:
        """After the forward pass of `batch`: count flips and, when it is time, compare with log-probabilities `without` replay.
        `first`: it is of the first mini-step; in later ones flips are counted and that is all.

        Raises InvalidInput when the replayed routes take the trainer away from the sampler, or from what it was itself.
        """
        if self._off or not self._carried or self._replay is None:
            return
        flips, compared = self._replay.flips() if batch.routes is not None else (0, 0)
        self._flips, self._compared = self._flips + flips, self._compared + compared
        if not first:
            return
        if self._mode == "trainer":
            self._examine_own(batch, logprobs_M, flips > MANY_FLIPS * compared)
            return
        wanted = batch.routes is not None and (self._due or flips > MANY_FLIPS * compared)
        if self._gaps is not None or not self._ranks.anywhere(wanted) or self._ranks.total(len(batch.index)) < FEW:
            return
        fresh = self._ranks.total(float(batch.fresh.sum())) >= FEW
        chosen_M = batch.fresh if fresh else np.ones(len(batch.fresh), bool)
        tokens = self._ranks.total(float(chosen_M.sum()))
        with torch.no_grad(), self._ranks.foreseen(None):
            live_M = without()
            gaps = (
                np.abs(found.detach().float().cpu().numpy() - batch.behaviour)[chosen_M] for found in (logprobs_M, live_M))
            gap, live = (self._ranks.total(float(gap_M.sum())) / tokens for gap_M in gaps)
        self._gaps, self._checked_once = (gap, live), True
        if gap > FACTOR * live + FLOOR:
            flips, compared = self._counts(flips, compared)
            raise InvalidInput(
                f"with the routes of the samples the trainer is {gap:.3g} nats off the sampler, without them {live:.3g}, and "
                f"{flips / max(compared, 1):.0%} of the routes differ: they are not those of these tokens or layers. Nothing "
                "was applied; repair the sampler, or set algorithm.route_replay = none", "ROUTES_MISALIGNED", field="routes")

    def _examine_own(self, batch: Microbatch, logprobs_M: torch.Tensor, many: bool) -> None:
        own = 0.0
        if batch.proximal is not None and len(batch.proximal):
            own = float(np.abs(logprobs_M.detach().cpu().numpy() - batch.proximal).mean())
        found = self._ranks.heard((own, many))
        gap = max(gap for gap, _ in found)
        self._gaps = (max(gap, self._gaps[0] if self._gaps else 0.0), None)
        if gap > OWN_GAP or any(many for _, many in found):
            raise InvalidInput(
                f"replayed routes of the trainer's own pass move its log-probabilities by {gap:.3g} nats and differ from the "
                "live ones though the weights are the same: they are not those of these tokens or layers, which is a fault of "
                "the trainer. Nothing was applied; set algorithm.route_replay = none and report the model's class",
                "ROUTES_MISALIGNED", field="routes")

    def metrics(self) -> dict[str, float | None]:
        """Of the batch so far. route_flip_share: share of replayed (token, layer) pairs where the live router wants another
        set, in all mini-steps. route_gap, route_gap_live: mean |log pi - log mu| with and without replay, of the tokens of one
        micro-batch; with the trainer's own routes route_gap is the largest mean |log pi - log p| of a micro-batch.
        """
        gap, live = self._gaps or (None, None)
        flips, compared = self._counts(self._flips, self._compared) if self._carried else (0, 0)
        share = flips / compared if compared else None
        return {"route_flip_share": share, "route_gap": gap, "route_gap_live": live}

    def _counts(self, flips: int, compared: int) -> tuple[int, int]:
        """Of all ranks."""
        [counts] = self._ranks.summed([torch.tensor([flips, compared])])
        return int(counts[0]), int(counts[1])
