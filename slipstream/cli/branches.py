"""`slipstream replay RUN` and `slipstream fork RUN@K NAME`: the command side. The work is done by tools of the trainer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream import config
from slipstream.cli import run_folder, run_start
from slipstream.cli.toml_text import dumps
from slipstream.errors import ConfigError
from slipstream.service_command import launch_environment


def replay(run: str, to: int | None) -> int:
    """Train again from the batch log and compare every version; the exit code: 0 equal, 1 not."""
    folder, _ = run_folder.find(run)
    return _tool("replay", "--folder", str(folder.path), *([] if to is None else ["--to", str(to)]))


def fork(place: str, name: str, overrides: Sequence[str]) -> int:
    """Make a run `name`, beside RUN, that starts where RUN stood after step K.

    Raises ConfigError when the name or a setting cannot be.
    """
    run, at, step = place.rpartition("@")
    if not at or not step.isdigit():
        raise ConfigError(f"{place!r} is not of the form RUN@K, such as sort-digits@40")
    origin, settings = run_folder.find(run)
    folder = origin.path.parent / name
    data = settings.model_dump(mode="json")
    data["run"] |= {"name": name, "folder": "" if folder == Path("runs", name).resolve() else str(folder)}
    data["service"]["buffer_address"] = ""
    config.parse(data)  # the name may be none
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another name, or delete it")
    folder.mkdir(parents=True)
    try:
        written = folder / "run.toml"
        written.write_text(dumps(_sparse(data)))
        if overrides:
            data = config.load(written, overrides).model_dump(mode="json")
            written.write_text(dumps(_sparse(data)))
        _check(settings, config.load(written), folder)
        code = _tool("fork", "--folder", str(origin.path), "--at", step, "--into", str(folder))
    except BaseException:
        shutil.rmtree(folder)
        raise
    if code:
        shutil.rmtree(folder)
        return code
    print(f"it goes on with: slipstream run {os.path.relpath(written)}")
    return 0


def _check(origin: config.RunFile, new: config.RunFile, folder: Path) -> None:
    """Raises ConfigError for a setting that a fork cannot change."""
    changed = run_start.different(origin.model_dump(mode="json"), new.model_dump(mode="json"), run_start.KEPT)
    for setting, before, after in changed:
        raise ConfigError(f"{setting} = {after}: a fork keeps the origin's {before}; remove the override")
    if new.folder != folder:
        raise ConfigError(f"run.name and run.folder of a fork follow from its name, {folder.name}: remove the override")
    if origin.objects.url and origin.objects.url.rstrip("/") == new.objects.url.rstrip("/"):
        raise ConfigError(f"objects.url = {origin.objects.url} is the origin's: give the fork one of its own with "
                          "--set objects.url=...")


def _sparse(data: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty: those are defaults, and a run file reads better without them."""
    return {key: _sparse(value) if isinstance(value, dict) else value for key, value in data.items()
            if value not in (None, "", {}, [])}


def _tool(name: str, *arguments: str) -> int:
    """Run a tool of the trainer in the environment that a trainer gets from the supervisor; its exit code."""
    return subprocess.run(
        [sys.executable, "-m", f"services.trainer.{name}", *arguments], env={**os.environ, **launch_environment()},
        check=False).returncode
