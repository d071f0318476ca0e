"""Replay: trains a run again from its first checkpoint and its batch log, and compares every policy version it published.

    python -m services.trainer.replay --folder RUN_FOLDER [--to K]

Consumes: the first checkpoint, batches 1..K of the log, hashes of the published versions (audit/versions.jsonl, and the
manifests that are still kept). Produces: `replayed 40 batches, 40 versions equal`, or the first version that differs and exit
code 1. Waits for: nobody; it only reads, so the run may be alive. Unblocked by: nothing needed.

Weights are a function of the first checkpoint and the batch log alone: the log has every decision (who is in the batch, what is
masked, the scores), so it does not matter how often trainers died, or which incarnation published what. A step that two
incarnations trained has two versions, and both must have the replayed weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from services.trainer.batches import assemble, fetch_routes
from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from services.trainer.reference import start_reference
from slipstream import batch_log, logs
from slipstream.config import RunFile, load
from slipstream.errors import ConfigError, InvalidInput, NotFound, SlipstreamError
from slipstream.manifest import layout, manifest_of, weights_hash
from slipstream.objects import ObjectStore, open_store

T = TypeVar("T")
TOLD_EVERY = 10


class Published(NamedTuple):
    """What is known of one published version."""

    step: int
    version: int
    incarnation: int
    weights: str  # slipstream.manifest.weights_hash


@dataclass
class Report:
    """What a replay found. `difference` is empty when every version that was compared is equal."""

    first: int  # step of the checkpoint that it started from
    batches: int = 0
    equal: int = 0  # versions of replayed steps; that of the first checkpoint is compared, too, and not counted
    difference: str = ""
    compared: set[int] = field(default_factory=set)

    @property
    def sentence(self) -> str:
        """`replayed 40 batches, 40 versions equal`"""
        found = f"replayed {self.batches} batches, {self.equal} versions equal"
        return f"{found}; {self.difference}" if self.difference else found


class Replay:
    """A learner that goes through the batch log. `load` first, then `through`."""

    def __init__(self, run: RunFile, store: ObjectStore) -> None:
        self.learner, self.step = Learner(run), 0
        self._store = store
        self._checkpoints = Checkpoints(store, run.run.name, run.trainer.keep_checkpoints)

    @property
    def incarnation(self) -> int:
        """The run's newest trainer incarnation, once something was loaded."""
        return self._checkpoints.pointer.incarnation

    async def load_first(self) -> int:
        """Start from the run's first checkpoint; its step. Raises NotFound when there is none."""
        await self._checkpoints.open()
        steps = await self._checkpoints.steps()
        if not steps:
            raise NotFound("the run has no checkpoint yet: nothing can be replayed", "NO_CHECKPOINT")
        return await self.load(steps[0])

    async def load(self, most: int) -> int:
        """Start from the newest checkpoint at or below step `most`; its step. Raises NotFound."""
        await self._checkpoints.open()
        header, snapshot = await self._checkpoints.load_at(most)
        await asyncio.to_thread(self.learner.load, snapshot)
        await start_reference(self.learner, self._checkpoints, asyncio.to_thread)
        self.step = header.step
        return self.step

    async def through(self, to: int, after_step: Callable[[int], Awaitable[bool]]) -> None:
        """Train batches up to `to`; stops early when `after_step(k)` says so. Raises NotFound for a batch not in the log."""
        while self.step < to:
            number = self.step + 1
            try:
                batch = await batch_log.read_header(self._store, number)
                bodies = await batch_log.read_bodies(self._store, batch)
            except NotFound:
                raise NotFound(f"batch {number} is not in the batch log: it reaches to {self.step}", "NO_BATCH") from None
            read = await asyncio.to_thread(assemble, batch, bodies, self.learner.run.algorithm.credit)
            if self.learner.run.algorithm.replays_sampler:
                await fetch_routes(read, self._store)
            await asyncio.to_thread(self.learner.step, read.groups, number)
            self.step = number
            if not await after_step(number):
                return

    async def weights(self) -> str:
        """Hash of the weights as they are now."""
        return await asyncio.to_thread(lambda: weights_hash(layout(self.learner.weights(), "-", {})[2]))


async def published(folder: Path, store: ObjectStore) -> dict[int, list[Published]]:
    """Versions by step: the trainer's lines, and manifests that are kept and have no equal line."""
    found = {Published(r["step"], r["version"], r["incarnation"], r["weights"]) for r in _lines(folder)}
    for key in await store.list("versions/"):
        if key.endswith("/manifest.json"):
            try:
                manifest = manifest_of(await store.get(key), key)
            except NotFound:  # deleted meanwhile: a live run
                continue
            found.add(Published(manifest.step, manifest.number, manifest.incarnation, weights_hash(manifest.tensors)))
    by_step: dict[int, list[Published]] = {}
    for version in sorted(found):
        by_step.setdefault(version.step, []).append(version)
    return by_step


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of audit/versions.jsonl; one torn by a kill is of a version that nobody was told of."""
    rows = []
    try:
        text = (folder / "audit" / "versions.jsonl").read_text()
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "weights" in row:
            rows.append(row)
    return rows


async def replay(
    replayer: Replay, versions: Mapping[int, Sequence[Published]], to: int, tell: Callable[[str], None],
) -> Report:
    """Train from the first checkpoint to step `to` and compare each version on the way. Stops at the first difference."""
    report = Report(await replayer.load_first())

    async def compare(step: int) -> bool:
        report.batches = step - report.first
        if expected := versions.get(step):
            weights = await replayer.weights()
            other = next((v for v in expected if v.weights != weights), None)
            report.equal += sum(v.weights == weights for v in expected) if step > report.first else 0
            if other is not None:
                report.difference = (
                    f"version {other.version} of step {step} (incarnation {other.incarnation}) differs: published "
                    f"{other.weights[:16]}, replayed {weights[:16]}")
        if report.batches and report.batches % TOLD_EVERY == 0:
            tell(report.sentence)
        return not report.difference

    if await compare(report.first):
        await replayer.through(to, compare)
    return report


async def _main(folder: Path, to: int | None) -> int:
    run = load(folder / "run.json")
    objects = run.objects
    async with open_store(run.objects_url, objects.endpoint, objects.region) as store:
        versions = await published(folder, store)
        newest = max(versions, default=0)
        if to is None:
            to = newest
        elif to > newest:
            raise InvalidInput(f"--to {to}: the newest step with a published version is {newest}", "STEP")
        if to < 1:
            raise ConfigError(f"{run.run.name} has published no trained version yet: there is nothing to replay")
        report = await replay(Replay(run, store), versions, to, lambda text: print(text, file=sys.stderr, flush=True))
    if not report.difference and not report.equal:
        print(f"slipstream: {report.sentence}: no version lies between step {report.first} and {to}", file=sys.stderr)
        return 1
    print(report.sentence, flush=True)
    return 1 if report.difference else 0


def command(work: Callable[[argparse.Namespace], Awaitable[int]], parser: argparse.ArgumentParser) -> int:
    """Run a tool of the trainer; a user's error is one line, code 2, another of ours code 1."""
    logs.configure("trainer", "tool", "")
    try:
        return asyncio.run(_awaited(work(parser.parse_args())))
    except SlipstreamError as error:
        print(f"slipstream: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidInput | NotFound) else 1


async def _awaited(work: Awaitable[T]) -> T:
    return await work


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m services.trainer.replay", description="Replay the batch log.")
    arguments.add_argument("--folder", type=Path, required=True, help="run folder")
    arguments.add_argument("--to", type=int, help="last step; default: the newest that has a published version")
    sys.exit(command(lambda found: _main(found.folder, found.to), arguments))
