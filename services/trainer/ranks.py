"""What a step needs of the ranks that take part in it. `Alone` is one process; services/trainer/parallel/world.py is many.

Every rank runs the learner's code on its own rows. What is of the whole step goes through here: who trains what, denominators,
counts, the gradient norm, errors. On many ranks every method is collective, and all ranks call them in the same order.

    rank 0: groups ──led──► rows ──shared──► every rank: its own rows ──microbatches──► as many passes on each
    every rank: gradients, counts, figures ──total, summed, gathered, clipped_step──► of the whole step
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from services.trainer import packed_attention
from services.trainer.optimizer import adamw, clipped_step
from services.trainer.packing import Fill, Microbatch, Row, microbatches
from services.trainer.scorer import Scorer
from slipstream import config
from slipstream.model import build
from slipstream.offload import Accelerator, Offload

T = TypeVar("T")
# Log-probabilities of the targets and entropies, two [M], from a micro-batch and whether entropies have a gradient.
Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def idle() -> Microbatch:
    """Of a rank that has fewer micro-batches than another: one token, so that every exchange takes place, and none to train."""
    nothing = Row(
        np.zeros(1, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64),
        reference=np.zeros(0, np.float32))
    [batch] = microbatches([nothing], 1)
    return replace(batch, lengths=np.zeros(1, np.int64), members=np.zeros(0, np.int64))


class Alone:
    """One process: it has every row, and what it counts is the count."""

    shares = 1  # parts that the rows of a step are cut into
    share = 0  # number of this rank's part
    scale = 1  # what a loss is multiplied by before its backward pass, where gradients are averaged and not added up

    def __init__(self, run: config.RunFile) -> None:
        self.run, self.packs = run, run.trainer.packing == "packed"
        self._offload = Offload()
        # Bits that do not depend on batch mates are promised, and tested, on a CPU.
        self.device = torch.device("cuda" if torch.cuda.is_available() and not run.deterministic else "cpu")

    @functools.cached_property
    def accelerator(self) -> Accelerator:
        """The device, and host memory beside it."""
        return Accelerator(self.device)

    def leave_device(self) -> None:
        """Move every model and optimizer that was made here to host memory."""
        self._offload.leave(self.accelerator)

    def enter_device(self) -> None:
        """The inverse."""
        self._offload.enter(self.accelerator)

    def built(self, settings: config.Model, prepare: Callable[..., Any] = lambda model, _: model) -> tuple[Any, Any]:
        """(model, tokenizer) that `settings` describe, in evaluation mode, spread over the ranks.

        `prepare` gets both as they are built and returns what of the model is wanted. Raises ConfigError as
        slipstream.model.build.
        """
        model, tokenizer = build(settings, self.run.run.seed, self.run.deterministic)
        # Evaluation mode: dropout and router jitter would make the trainer's distribution differ from the sampler's.
        found = prepare(model.eval(), tokenizer).to(self.device)
        self._offload.model(found)
        return packed_attention.attach(found) if self.packs else found, tokenizer

    def completed(self, module: Any) -> Any:
        """A module around a built model, its `backbone`: what it adds is spread, too."""
        return module

    def scorer(self, model: Any) -> Score:
        """The model as a function from a micro-batch to log-probabilities and entropies. Raises ConfigError as
        services.trainer.packed_attention.verify.
        """
        if self.packs:
            packed_attention.verify(model)
        return Scorer(model, self.run.trainer.logit_rows)

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
        """See services.trainer.optimizer.adamw."""
        optimizer = adamw(model, self.run.trainer, learning_rate)
        self._offload.trained(model, optimizer)
        return optimizer

    def clipped_step(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float, what: str, loss: float = 0.0,
    ) -> float:
        """See services.trainer.optimizer.clipped_step; the norm is that of the whole gradient. Raises NonFinite everywhere."""
        return clipped_step(optimizer, model.parameters(), max_norm, what, loss)

    def led(self, work: Callable[[Callable[[str], Fill]], list[Row]], fills: Mapping[str, Fill]) -> list[Row]:
        """`work`, on rank 0 alone; elsewhere nothing comes back. `work` gets `fills` by name: what it calls of them runs on
        all ranks, each with its part of the rows. Errors of ours that `work` raises are raised on every rank.
        """
        return work(lambda name: fills[name])

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """An error of ours that a rank raises inside, between collectives, is raised on every rank at the end."""
        yield

    def told(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def heard(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        return [value]

    def anywhere(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return here

    def shared(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Of rank 0's rows those of this rank."""
        return rows

    def microbatches(self, rows: Sequence[Row], tokens: int) -> list[Microbatch]:
        """Of this rank's rows, as many as every other rank has; those that fill up train no token."""
        return microbatches(rows, tokens, self.packs)

    def foresee(self, layers: Sequence[Any], batches: Sequence[Microbatch]) -> None:
        """Before a step on `batches`, whose routes will be replayed in the experts `layers`: plan its exchanges, if the run
        file says so. Without batches nothing is known of what comes.
        """

    def foreseen(self, number: int | None) -> contextlib.AbstractContextManager[None]:
        """Passes of micro-batch `number` of the step, with its routes, belong inside; None: passes of anything else."""
        return contextlib.nullcontext()

    def part(self, batch: Microbatch) -> Microbatch:
        """What of a micro-batch this rank's layers see: with context parallelism a piece of each row."""
        return batch

    def total(self, value: float) -> float:
        """The sum over the shares, of what is of whole micro-batches."""
        return value

    def summed(self, counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum over all ranks, of what is of a `part`; tensor by tensor."""
        return list(counts)

    def gathered(self, value: T) -> list[T]:
        """Each share's, on rank 0; elsewhere nothing."""
        return [value]

    def close(self) -> None:
        """Give back what was taken."""
