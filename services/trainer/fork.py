"""Fork: a new run that starts where another one stood after step K, with its own ledger. The origin is only read.

    python -m services.trainer.fork --folder ORIGIN --at K --into FOLDER

Consumes: the origin's newest checkpoint at or below K, and its batch log from there to K. Produces, for the run file that is
already in FOLDER (run.toml): checkpoint K, in force; when the schedule is pinned, the versions that its first draws name; the
last batches of the log, from which the new ledger knows where draws go on; metrics and audit lines up to K; fork.json, which
says where all that came from.
Waits for: nobody. Unblocked by: nothing needed.

When the origin published step K, the forked weights are compared with that version, and a difference is an error.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.trainer.checkpoint import Checkpoints
from services.trainer.loop import WINDOW
from services.trainer.replay import Replay, command, published
from slipstream import batch_log
from slipstream.config import RunFile, load
from slipstream.errors import ConfigError, InvalidInput, NotFound, SlipstreamError
from slipstream.manifest import write_base, write_version
from slipstream.objects import ObjectStore, open_store


async def fork(origin: RunFile, new: RunFile, at: int) -> dict[str, Any]:
    """Make the objects and records of the new run; returns what fork.json holds. Raises NotFound, InvalidInput, ConfigError."""
    if new.run.name == origin.run.name:
        raise ConfigError(f"run.name = {new.run.name!r} is the origin's: a fork needs a name of its own")
    if new.objects_url.rstrip("/") == origin.objects_url.rstrip("/"):
        raise ConfigError(f"objects.url = {new.objects_url} is the origin's: a fork needs a place of its own")
    options = origin.objects
    async with open_store(origin.objects_url, options.endpoint, options.region) as old, \
            open_store(new.objects_url, new.objects.endpoint, new.objects.region) as store:
        if await store.list("checkpoints/") or await store.list("batches/"):
            raise ConfigError(f"objects.url = {new.objects_url} holds a run already: choose another place")
        versions = await published(origin.folder, old)
        told = (row["step"] for _, row in _rows(origin.folder / "metrics.jsonl") if "step" in row)
        trained = max([*versions, *told], default=0)
        if at > trained:  # its batch may be in the log already, but what it made of the weights is not known
            raise NotFound(f"the newest step that was trained is {trained}", "STEP")
        replay = Replay(origin, old)
        # Pinned draws name the version of an older step, so the new run needs the versions since then, too.
        oldest = max(0, at - new.schedule.max_lag) if new.schedule.pinned else at
        started = await replay.load(oldest)

        async def publish(step: int) -> bool:
            if oldest <= step < at:
                base = replay.learner.base()
                await write_version(
                    store, run=new.run.name, number=step + 1, step=step, incarnation=replay.incarnation,
                    tensors=replay.learner.weights(), files=replay.learner.files(),
                    base=await write_base(store, base) if base else None)
            return True

        await publish(started)
        await replay.through(at, publish)
        weights = await replay.weights()
        for version in versions.get(at, ()):
            if version.weights != weights:
                raise SlipstreamError(
                    f"step {at}, replayed from checkpoint {started}, is not what version {version.version} published: run "
                    "`slipstream replay` to find the first step that differs", "REPLAY")
        draws = await _copy_log(old, store, at, max(origin.schedule.max_lag, new.schedule.max_lag))
        _copy_lines(origin.folder, new.folder, at)
        checkpoints = Checkpoints(store, new.run.name, new.trainer.keep_checkpoints)
        await checkpoints.open()
        header = await checkpoints.save(
            replay.learner.snapshot(), step=at, incarnation=replay.incarnation, ledger_sequence=0, ledger_epoch=0,
            notes={"rewards": _rewards(new.folder), "origin": origin.run.name})
    return {
        "origin": {"run": origin.run.name, "folder": str(origin.folder), "objects": origin.objects_url, "hash": origin.hash},
        "settings": origin.model_dump(mode="json"),
        "step": at, "draws": draws, "replayed_from": started, "checkpoint": header.name, "weights": weights,
        "time_unix": time.time()}


async def _copy_log(old: ObjectStore, new: ObjectStore, at: int, max_lag: int) -> int:
    """The last batches: a new ledger goes on behind the draws that they name. How many draws the origin had made by then."""
    draws = 0
    for number in range(max(1, at - max_lag), at + 1):
        key = batch_log.log_key(number)
        await new.put_if_absent(key, await old.get(key))
        batch = await batch_log.read_header(old, number)
        named = [g.draw.number for g in batch.groups] + [d.draw.number for d in batch.drops]
        draws = max(draws, batch.next_draw, *(number + 1 for number in named))
    return draws


def _copy_lines(old: Path, new: Path, at: int) -> None:
    """Metrics and audit lines up to the step, so that the new run's records begin where its weights do."""
    (new / "audit").mkdir(parents=True, exist_ok=True)
    for name, field in (("metrics.jsonl", "step"), ("audit/trainer.jsonl", "batch")):
        kept = [line for line, row in _rows(old / name) if row.get(field, at + 1) <= at]
        (new / name).write_text("".join(f"{line}\n" for line in kept))


def _rewards(folder: Path) -> list[float]:
    """Mean rewards of the last steps, with which the trainer judges whether the target is reached."""
    by_step = {row["step"]: row["reward_mean"] for _, row in _rows(folder / "metrics.jsonl") if "reward_mean" in row}
    return [by_step[step] for step in sorted(by_step)][-WINDOW:]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines of a JSONL file, with what they say."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        if isinstance(row, dict):
            yield line, row


async def _main(folder: Path, at: int, into: Path) -> int:
    origin, new = load(folder / "run.json"), load(into / "run.toml")
    if at < 1:
        raise InvalidInput(f"step {at}: fork after step 1 or a later one; for a fresh start take another run.name", "STEP")
    try:
        provenance = await fork(origin, new, at)
    except NotFound as error:
        raise NotFound(f"{origin.run.name}@{at} cannot be forked: {error.message}", error.reason) from error
    (into / "fork.json").write_text(json.dumps(provenance, indent=1))
    print(f"{new.run.name} starts from {origin.run.name} after step {at} (checkpoint {provenance['replayed_from']} and "
          f"{at - provenance['replayed_from']} replayed batches)", flush=True)
    return 0


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(prog="python -m services.trainer.fork", description="Fork a run after a step.")
    arguments.add_argument("--folder", type=Path, required=True, help="run folder of the origin")
    arguments.add_argument("--at", type=int, required=True, help="step after which the new run starts")
    arguments.add_argument("--into", type=Path, required=True, help="folder of the new run, with its run.toml")
    sys.exit(command(lambda found: _main(found.folder, found.at, found.into), arguments))
