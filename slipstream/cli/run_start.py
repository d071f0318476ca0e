"""What a start makes of a run folder: a new run, one that goes on, or the first start of a fork."""

from __future__ import annotations

import enum
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream import auth, config, formats
from slipstream.cli.run_folder import RunFolder, check_ours, held, read_json, writing
from slipstream.errors import ConfigError

# Settings that a fork keeps: with other weights or other batches it would not go on from the checkpoint.
KEPT = (
    "model.path", "model.gguf_file", "model.build", "model.dtype", "model.lora", "schedule.groups_per_batch",
    "schedule.group_size", "schedule.mode")
# What makes a folder a fork, before its first start.
FORKED = ("run.toml", "fork.json", "objects", "audit", "metrics.jsonl")


class Start(enum.Enum):
    """What a start makes of the folder."""

    NEW = "a new run"
    OVER = "a new run, after what is there is deleted"  # asked for, or because nothing came of it
    FORK = "the first start of a fork"
    RESUME = "the run there goes on"
    FINISHED = "the run there is finished, and a start says again how it ended"


def start(folder: RunFolder, run: config.RunFile, fresh: bool) -> Start:
    """What a start will make of the folder; changes nothing. Raises ConfigError when it holds a run with other settings."""
    check_ours(folder)
    if fresh:
        if folder.fork.exists():
            raise ConfigError(f"{folder.path} is a fork, and --fresh would delete where it starts from: delete the folder, and "
                              "make it again with `slipstream fork`")
        _can_be_emptied(folder, run)
        return Start.OVER if folder.run_file.exists() else Start.NEW
    formats.check_folder(folder.path)
    origin = read_json(folder.fork)
    if not folder.run_file.exists():
        return Start.FORK if origin and _goes_on_from(folder, origin, run) else Start.NEW
    if (changed := _changed(folder, run)) is None:
        return Start.FINISHED if _finished(folder, run) else Start.RESUME
    if _published(folder) or run.buffer.redis or run.objects.url:
        raise ConfigError(changed)
    return Start.FORK if origin and _goes_on_from(folder, origin, run) else Start.OVER


def free(folder: RunFolder) -> None:
    """Looks only. Raises ConfigError when a live run has the folder, or when it could not be written."""
    if folder.lock.exists() and held(folder):
        raise ConfigError(f"{folder.path} is locked by a live run: follow it with `slipstream watch {folder.path}`, or set "
                          "another run.name")
    existing = next(p for p in (folder.path, *folder.path.parents) if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK) or existing.parts[1:2] in (("proc",), ("sys",)):
        raise ConfigError(f"run folder {folder.path} cannot be written ({existing} takes no files of this user): "
                          "set run.folder to another one")


def lay_out(folder: RunFolder, run: config.RunFile, fresh: bool) -> Start:
    """Make the locked folder ready for a start: emptied when `fresh`, else checked to hold this run or none.

    A run that ended before its first policy version is none: other settings may take its place. Raises ConfigError as `start`.
    """
    with writing(folder):
        match made := start(folder, run, fresh):
            case Start.OVER:
                _empty(folder, keep=())
            case Start.FORK:
                _empty(folder, keep=FORKED)
        formats.stamp_folder(folder.path)
        for directory in (folder.services, folder.logs, folder.trained.parent, folder.redis):
            directory.mkdir(exist_ok=True)
        for stale in (*folder.services.glob("*.json"), folder.state):
            stale.unlink(missing_ok=True)
        auth.create_secret(folder.path)
        return made


def _published(folder: RunFolder) -> bool:
    """Something came of the run there: a policy version, or in supervised fine-tuning a step."""
    own = folder.metrics if not folder.fork.exists() else folder.published
    return any(path.exists() and path.stat().st_size for path in (own, folder.published))


def _finished(folder: RunFolder, run: config.RunFile) -> bool:
    """Its trainer came to its end, which is the end of this run file, too."""
    processes = (read_json(folder.state) or {}).get("processes", {}).values()
    before = config.load(folder.run_file).run
    return (before.steps, before.target_reward) == (run.run.steps, run.run.target_reward) and any(
        p["service"] == "trainer" and p["state"] == "finished" for p in processes)


def _goes_on_from(folder: RunFolder, origin: dict[str, Any], run: config.RunFile) -> bool:
    """True; raises ConfigError for settings that a fork takes from its origin."""
    kept = origin.get("settings")
    if kept and (found := next(different(kept, run.model_dump(mode="json"), KEPT), None)):
        name, before, after = found
        raise ConfigError(f"{name} = {after}: {folder.path.name} is a fork and keeps its origin's {before}; set it back")
    return True


def _changed(folder: RunFolder, run: config.RunFile) -> str | None:
    """None when the folder holds a run with these settings; else what speaks against going on with it, and the remedy."""
    try:
        before = config.load(folder.run_file)
    except ConfigError as error:
        return (f"{folder.path} holds a run that this version cannot read ({error}): start over with --fresh, or set another "
                "run.name")
    if before.hash == run.hash:
        return None
    changed = [f"{name} was {old} and is {new}" for name, old, new in different(
        before.model_dump(mode="json"), run.model_dump(mode="json")) if not name.startswith(("run.folder", "service."))]
    return (f"{folder.path} holds a run with other settings ({'; '.join(changed[:3])}{'; ...' if len(changed) > 3 else ''}): "
            f"set them back (all are in {folder.run_file}), set another run.name, or delete what it trained and start over "
            "with --fresh")


def different(before: Any, after: Any, only: tuple[str, ...] = ("",), place: str = "") -> Iterator[tuple[str, str, str]]:
    """(Setting, its value before, its value after) of two resolved run files, where it begins with one of `only`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from different(before.get(key), after.get(key), only, f"{place}.{key}" if place else key)
    elif before != after and place.startswith(only):
        yield place, json.dumps(before)[:60], json.dumps(after)[:60]


def _can_be_emptied(folder: RunFolder, run: config.RunFile) -> None:
    objects = run.objects_url.removeprefix("file://")
    if run.objects.url and not Path(objects).is_relative_to(folder.path):
        raise ConfigError(f"--fresh does not empty objects.url = {run.objects.url}: choose another run.name and prefix, or "
                          "empty it yourself and delete the run folder")
    if run.buffer.redis:
        raise ConfigError(f"--fresh does not empty buffer.redis = {run.buffer.redis}: choose another run.name, or empty it "
                          "yourself and delete the run folder")


def _empty(folder: RunFolder, keep: tuple[str, ...]) -> None:
    """Delete what the folder holds, all but the lock and `keep`."""
    for entry in folder.path.iterdir():
        if entry == folder.lock or entry.name in keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
