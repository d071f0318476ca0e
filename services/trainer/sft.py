"""Supervised fine-tuning, for the start of a campaign: `slipstream sft RUN.toml` starts this.

    python -m services.trainer.sft --folder RUN_FOLDER

    dataset ─► rows, prompts masked ─► held-out share ─► steps of sft.rows rows ─► now and then validation, checkpoint ─► model

Consumes     the dataset, the checkpoint in force (object store).
Produces     metrics.jsonl, checkpoints, at the end a Hugging Face directory in <folder>/model, which `model.path` takes.
Waits for    nothing but its own work. Unblocked by: nothing needed; a stop ends it after the step, with a checkpoint.

Learner, optimizer, packing, micro-batches and checkpoints are those of reinforcement learning. Loss of a step: -log pi(target)
summed over all its targets, divided by their number, whatever the micro-batches: transformers' own `labels` loss on these
tokens. Which rows a step takes is a function of the run's seed and the step, so a resumed run is the undisturbed one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer import final_model
from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from services.trainer.optimizer import ramp
from services.trainer.packing import Row, microbatches
from services.trainer.records import Records
from services.trainer.replay import command
from services.trainer.supervised import Reader
from slipstream import config, seeds
from slipstream.errors import ConfigError
from slipstream.model import stop_token_ids
from slipstream.objects import open_store

TOLD_S = 5.0  # between two lines of progress


class Course:
    """The rows of a run in the order in which steps take them. Raises ConfigError for a row that cannot be learnt."""

    def __init__(self, run: config.RunFile, records: Sequence[dict[str, Any]], reader: Reader) -> None:
        assert run.sft is not None
        self._seed, self._size, self.skipped = run.run.seed, run.sft.rows, 0
        order = self._permutation("sft/validation", 0, len(records))
        held = {int(i) for i in order[: math.ceil(run.sft.validation * len(records))]}
        self.training: list[Row] = []
        self.validation: list[Row] = []
        for number, record in enumerate(records):
            rows = reader.rows(record, number)
            longest = max(len(row.inputs) + 1 for row in rows)
            if longest > run.sft.max_tokens:
                if run.sft.too_long == "refuse":
                    raise ConfigError(
                        f"{Path(run.sft.path).name}, row {number} has {longest} tokens, sft.max_tokens = {run.sft.max_tokens}; "
                        "raise it, shorten the row, or set sft.too_long = skip")
                self.skipped += 1
            else:
                (self.validation if number in held else self.training).extend(rows)
        if not self.training:
            raise ConfigError(
                f"sft.path = {run.sft.path!r} leaves no row to train on: {len(records)} rows, {len(held)} of them held out, "
                f"{self.skipped} too long; lower sft.validation, or raise sft.max_tokens")
        self.steps = run.run.steps if run.sft.epochs is None else math.ceil(run.sft.epochs * len(self.training) / self._size)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def of_step(self, step: int) -> list[Row]:
        """Rows of step 1, 2, ...: epoch after epoch, each in an order of its own."""
        return [self.training[self._at(place)] for place in range((step - 1) * self._size, step * self._size)]

    def epoch(self, step: int) -> float:
        """How often the rows were seen after `step`."""
        return step * self._size / len(self.training)

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self.training))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._permutation("sft/epoch", epoch, len(self.training))
        return int(self._order[within])

    def _permutation(self, name: str, number: int, count: int) -> np.ndarray:
        return np.random.default_rng(seeds.stream(self._seed, name, number)).permutation(count)


def learning_rate(run: config.RunFile, step: int, steps: int) -> float:
    """Of step 1, 2, ...: up to trainer.learning_rate in sft.ramp_steps, then down to 0 behind the last step, or not."""
    assert run.sft is not None
    up = ramp(step - 1, run.sft.ramp_steps)
    gone = max(0.0, (step - 1 - run.sft.ramp_steps) / max(1, steps - run.sft.ramp_steps))
    down = {"constant": 1.0, "linear": 1 - gone, "cosine": (1 + math.cos(math.pi * min(1.0, gone))) / 2}[run.sft.decay]
    return run.trainer.learning_rate * up * down


@torch.no_grad()
def validation_loss(learner: Learner, rows: Sequence[Row]) -> float | None:
    """-mean log pi(target) over the held-out rows; None without any."""
    if not rows:
        return None
    total = sum(-float(learner.forward(b)[0].sum()) for b in microbatches(rows, learner.run.trainer.tokens_per_microbatch))
    return total / sum(len(row.index) for row in rows)


class Tuning:
    """One start of a supervised run."""

    def __init__(self, run: config.RunFile, learner: Learner, course: Course, checkpoints: Checkpoints) -> None:
        self.run, self.learner, self.course, self.checkpoints = run, learner, course, checkpoints
        self.records = Records(run.folder)
        self.stopping = asyncio.Event()
        self.step = self._saved = 0
        self._incarnation, self._told = 1, time.monotonic()

    async def start(self) -> None:
        """Take over from a predecessor: its checkpoint, and its place."""
        await self.checkpoints.open()
        loaded = await self.checkpoints.load()
        self._incarnation = self.checkpoints.pointer.incarnation + 1
        await self.checkpoints.take_over(self._incarnation)
        if loaded is not None:
            self.step = self._saved = loaded[0].step
            self.learner.load(loaded[1])
        self.records.resume(self.step)

    async def all(self) -> bool:
        """Train until the end or a stop, and save. Returns whether it came to the end."""
        trainer, steps = self.run.trainer, self.course.steps
        try:
            while self.step < steps and not self.stopping.is_set():
                entry = await asyncio.to_thread(self._next)
                self.records.metrics(entry)
                self._tell(entry)
                if self.step % trainer.checkpoint_every == 0:
                    await self._checkpoint()
            await self._checkpoint()
            if self.step < steps:
                return False
            await asyncio.to_thread(final_model.save, self.learner, self.run.folder / "model")
            return True
        finally:
            self.records.close()

    def _next(self) -> dict[str, Any]:
        """One optimizer step; its metrics, as a line of metrics.jsonl."""
        assert self.run.sft is not None
        started, number, course = time.monotonic(), self.step + 1, self.course
        rows, rate = course.of_step(number), learning_rate(self.run, number, course.steps)
        loss = self.learner.supervised_step(rows, rate, f"step {number}")
        self.step = number
        due = number % self.run.sft.validate_every == 0 or number == course.steps
        took, tokens = time.monotonic() - started, sum(len(row.inputs) + 1 for row in rows)
        return {
            "step": number, "epoch": course.epoch(number), "loss": loss, "learning_rate": rate, "rows": len(rows),
            "validation_loss": validation_loss(self.learner, course.validation) if due else None, "tokens": tokens,
            "trained_tokens": sum(len(row.index) for row in rows), "step_s": took, "tokens_per_s": tokens / took,
            "incarnation": self._incarnation, "checkpoint_step": self._saved, "time_unix": time.time()}

    async def _checkpoint(self) -> None:
        if self._saved == self.step:
            return
        await self.checkpoints.save(
            self.learner.snapshot(), step=self.step, incarnation=self._incarnation, ledger_sequence=0)
        self._saved = self.step
        await self.checkpoints.retain()

    def _tell(self, entry: dict[str, Any]) -> None:
        """A line now and then, at each validation and at the end."""
        held = entry["validation_loss"]
        if held is None and self.step < self.course.steps and time.monotonic() - self._told < TOLD_S:
            return
        self._told = time.monotonic()
        more = "" if held is None else f"  held out {held:.4f}"
        print(f"{time.strftime('%H:%M:%S')} step {self.step}/{self.course.steps}  epoch {entry['epoch']:.2f}  "
              f"loss {entry['loss']:.4f}{more}  tokens/s {entry['tokens_per_s']:.0f}", flush=True)


async def tune(run: config.RunFile) -> bool:
    """The whole run. Returns whether it came to the end. Raises ConfigError for what the user can mend."""
    if run.sft is None:
        raise ConfigError("the run file has no table [sft]: name a dataset with sft.path")
    learner = Learner(run)
    reader = Reader(learner.tokenizer, stop_token_ids(learner.tokenizer, learner.model), run.sft)
    course = Course(run, await reader.records(), reader)
    objects = run.objects
    async with open_store(run.objects_url, objects.endpoint, objects.region) as store:
        tuning = Tuning(run, learner, course, Checkpoints(store, run.run.name, run.trainer.keep_checkpoints))
        with _on_signals(tuning.stopping):
            await tuning.start()
            more = f", {course.skipped} too long" if course.skipped else ""
            print(f"{len(course.training)} rows to learn, {len(course.validation)} held out{more}; {course.steps} steps"
                  + (f", going on after step {tuning.step}" if tuning.step else ""), flush=True)
            ended = await tuning.all()
    if ended:
        print(f"model    {run.folder / 'model'}\nmetrics  {run.folder / 'metrics.jsonl'}", flush=True)
    else:
        print(f"stopped at step {tuning.step} of {course.steps}: the same command goes on from there", flush=True)
    return ended


@contextlib.contextmanager
def _on_signals(stopping: asyncio.Event) -> Any:
    """Ctrl-C and kill end the run after the step; the second one at once."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        stopping.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _main(folder: Path) -> int:
    await tune(config.load(folder / "run.json"))
    return 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m services.trainer.sft", description="Supervised fine-tuning.")
    arguments.add_argument("--folder", type=Path, required=True, help="run folder, with run.json")
    sys.exit(command(lambda found: _main(found.folder), arguments))
