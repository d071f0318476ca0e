"""A step whose loss or gradient is not finite: skipped, with the samples behind it named and kept.

Nothing is applied: weights, moments and learning rate stay as they are, and the step counts like a batch without signal. With
several optimizer steps per batch that is so for each of them: the one with the NaN is left out, the others of its batch stand,
and no copy of the weights is kept to undo them. On the
CPU the same batch on the same weights is skipped again, so a resume and a replay of the log come to the same weights.

Who is behind it: each micro-batch is run again, then each row of those that are not finite. When no row alone is (a sum that
overflowed), all rows of the micro-batch are named. Their bodies are in the batch log, which is never deleted; a line in
audit/nonfinite.jsonl says where:

    {"batch": 7, "incarnation": 2, "log": "batches/00000007.bin", "weights": "",
     "samples": [{"draw": 31, "sample": 4, "segment": 0, "what": "loss"}]}

Axes: M trained tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from services.trainer.packing import Microbatch, Row, microbatches
from services.trainer.ranks import Alone, idle
from slipstream import logs
from slipstream.batch_log import log_key
from slipstream.errors import ConfigError

NAMED = 8  # samples that a log line names; the record has all

log = logs.get("trainer.nonfinite")


@dataclass(frozen=True, slots=True)
class Culprit:
    """A segment behind it. `what`: record (of the sampler), loss, gradient, or sum (only together with others)."""

    draw: int
    sample: int
    segment: int
    what: str


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a step was skipped. `weights` names a parameter that is not finite itself; then no sample is to blame."""

    culprits: Sequence[Culprit]
    weights: str = ""
    part: str = ""  # which of several mini-steps, when not the whole batch

    @property
    def samples(self) -> int:
        """Samples that are named."""
        return len({(c.draw, c.sample) for c in self.culprits})

    @property
    def sentence(self) -> str:
        """Who, in one line."""
        if self.weights:
            return f"the weights themselves are not finite, first {self.weights}"
        named = [f"draw {c.draw}, sample {c.sample}, segment {c.segment} ({c.what})" for c in self.culprits[:NAMED]]
        more = len(self.culprits) - len(named)
        return "; ".join(named) + (f"; and {more} more" if more else "")


def together(skips: Sequence[tuple[int, Skip]], mini_steps: int) -> Skip:
    """The skipped ones of a batch's mini-steps, each with its number from 1, as one."""
    numbers = ", ".join(str(number) for number, _ in skips)
    part = f"mini-step {numbers} of {mini_steps}" if len(skips) < mini_steps else ""
    found = [skip for _, skip in skips]
    return Skip(
        [culprit for skip in found for culprit in skip.culprits], next((s.weights for s in found if s.weights), ""), part)


def recorded(rows: Sequence[Row]) -> list[Culprit]:
    """Rows whose log-probabilities came in as NaN or infinite: no forward pass is needed to see it."""
    return [
        _culprit(row, "record") for row in rows
        if not (np.isfinite(row.behaviour).all() and (row.reference is None or np.isfinite(row.reference).all()))]


def search(
    rows: Sequence[Row], batches: Sequence[Microbatch], loss: Callable[[Microbatch], torch.Tensor], model: nn.Module,
    ranks: Alone,
) -> Skip:
    """Run the step's micro-batches again and find the rows behind a NaN. `loss` is a micro-batch's part of the step's loss.

    Leaves no gradients. `batches` are ranks.microbatches(rows, ...). On many ranks a gradient is everybody's, so a micro-batch
    that is not finite together with those of other ranks is tried again while they idle, and so are its rows.
    """
    own = next((name for name, p in model.named_parameters() if not _finite(p)), "")
    if broken := next((name for name in ranks.heard(own) if name), ""):
        return Skip([], broken)
    found = []
    for batch in batches:
        members = [rows[i] for i in batch.members.tolist()]
        if not _trial(batch, loss, model, ranks):
            continue
        for share in range(ranks.shares):
            mine = share == ranks.share
            if ranks.shares > 1 and not _trial(batch if mine else idle(), loss, model, ranks):
                continue
            alone = []
            for i in range(max(ranks.heard(len(members) if mine else 0))):
                what = _trial(microbatches([members[i]], len(members[i].inputs))[0] if mine else idle(), loss, model, ranks)
                alone += [(members[i], what)] if mine else []
            found += [_culprit(row, what) for row, what in alone if what] or [_culprit(row, "sum") for row, _ in alone]
    return Skip(_all_of(found, ranks) or _all_of([_culprit(row, "sum") for row in rows], ranks))


def _all_of(culprits: Sequence[Culprit], ranks: Alone) -> list[Culprit]:
    """Of every rank; those that have the same rows say the same."""
    return list(dict.fromkeys(culprit for part in ranks.heard(culprits) for culprit in part))


def _trial(batch: Microbatch, loss: Callable[[Microbatch], torch.Tensor], model: nn.Module, ranks: Alone) -> str:
    """What is not finite of this micro-batch alone, or of those of all ranks together: loss, gradient, or nothing."""
    model.zero_grad(set_to_none=True)
    try:
        value = loss(batch)
        if ranks.anywhere(not bool(torch.isfinite(value))):
            return "loss"
        value.backward()
        finite = all(_finite(p.grad) for p in model.parameters() if p.grad is not None)
        return "gradient" if ranks.anywhere(not finite) else ""
    finally:
        model.zero_grad(set_to_none=True)


def _finite(tensor: torch.Tensor) -> bool:
    """This rank's part of it."""
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bool(torch.isfinite(own).all())


def _culprit(row: Row, what: str) -> Culprit:
    return Culprit(*row.origin, what)


class SkipRecord:
    """Counts skipped steps in a row, tells them, and keeps who was behind them in <folder>/audit/nonfinite.jsonl."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.path, self.limit, self.in_a_row = folder / "audit" / "nonfinite.jsonl", limit, 0

    def judge(self, skip: Skip | None, batch: int, incarnation: int) -> None:
        """Step `batch` was skipped, wholly or in part, or not (None). The record's line is on the disk when this returns.

        Raises ConfigError when `limit` steps in a row were skipped: going on would train nothing.
        """
        if skip is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        line = json.dumps({
            "batch": batch, "incarnation": incarnation, "log": log_key(batch), "weights": skip.weights,
            **({"part": skip.part} if skip.part else {}), "samples": [asdict(c) for c in skip.culprits]})
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        what = f"{skip.part} of step {batch}" if skip.part else f"step {batch}"
        log.error(f"{what} is skipped, its loss or gradient is not finite: {skip.sentence}", batch=batch)
        if self.in_a_row >= self.limit:
            first = batch - self.in_a_row + 1
            raise ConfigError(
                f"the last {self.in_a_row} steps, {first} to {batch}, were skipped because loss or gradient was not finite "
                f"(trainer.nonfinite_limit = {self.limit}); the last one: {skip.sentence}. Who was behind each is in "
                f"{self.path}. Lower trainer.learning_rate and fork the run at step {first - 1}, or mend the samples' source",
                "NON_FINITE")
