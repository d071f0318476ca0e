"""`slipstream status`, `watch` and `generate`: commands on a run that exists. They change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from rich.console import Console

from slipstream.cli import run_folder
from slipstream.cli.survey import Survey
from slipstream.cli.view import Snapshot, alarms, line, services_table
from slipstream.cli.watch import Watcher
from slipstream.errors import ConfigError
from slipstream.service_command import launch_environment


def status(run: str, as_json: bool) -> int:
    """Print a table, or JSON, of every process."""
    folder, settings = run_folder.find(run)
    console = Console()
    alive = run_folder.held(folder)
    snapshot = asyncio.run(_look(Watcher(folder, settings, console)))
    if not alive and snapshot.state != "not started":
        snapshot.state = "gone" if snapshot.state != "ended" else "ended"
    if as_json:
        print(json.dumps({
            "run": snapshot.run, "folder": str(folder.path), "alive": alive, "state": snapshot.state,
            "stall": snapshot.stall, "forked_from": _origin(folder),
            "step": snapshot.metrics.step, "steps": snapshot.steps, "metrics": snapshot.metrics.last, "events": snapshot.events,
            "services": [dataclasses.asdict(s) for s in snapshot.services]}, indent=1))
    else:
        console.print(line(snapshot), markup=False, highlight=False, soft_wrap=True)
        for sentence in alarms(snapshot):
            console.print(sentence, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
        if snapshot.stall:
            console.print(f"stalled: {snapshot.stall}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        if snapshot.failed_groups:
            print(f"{snapshot.failed_groups} groups failed: `slipstream ledger {run} --dead` says why")
        if alive:
            console.print(services_table(snapshot))
        else:
            print(f"{snapshot.run} {_ended(folder)}; its folder is {folder.path}")
    return 0


def _ended(folder: run_folder.RunFolder) -> str:
    """How a run ended that is not alive, and what to do about it."""
    state = run_folder.read_json(folder.state)
    goes_on = "`slipstream run` with the same settings goes on from its last checkpoint"
    if state is None:
        return "was not started yet"
    match state.get("ending"):
        case {"reason": "finished"}:
            return "is finished"
        case {"reason": "failed", "error": error}:
            return f"failed: {error}"
        case {"reason": "stopped" | "killed"} if state["state"] == "ended":
            return f"was stopped: {goes_on}"
    return f"is not running, and nobody stopped it: its supervisor was killed, or the machine went down. {goes_on}"


def _origin(folder: run_folder.RunFolder) -> dict[str, Any] | None:
    """Where a fork came from, without the origin's settings."""
    found = run_folder.read_json(folder.fork)
    return {k: v for k, v in found.items() if k != "settings"} if found else None


async def _look(watcher: Watcher) -> Snapshot:
    async with Survey(watcher.folder) as survey:
        return await watcher.snapshot(survey)


def watch(run: str, plain: bool) -> int:
    """Follow a live run until it ends or Ctrl-C. Raises ConfigError when it does not run."""
    folder, settings = run_folder.find(run)
    if not run_folder.held(folder):
        raise ConfigError(
            f"{settings.run.name} is not running: `slipstream run` starts it, `slipstream status {run}` shows how it ended")
    console = Console()
    asyncio.run(Watcher(folder, settings, console).follow(plain or not console.is_terminal))
    return 0


def generate(run: str, text: str, options: list[str]) -> int:
    """Print the model's answer, by a process that may load torch; its exit code."""
    folder, _ = run_folder.find(run)
    return subprocess.run(
        [sys.executable, "-m", "services.rollout.generate", "--folder", str(folder.path), *options, "--", text],
        env={**os.environ, **launch_environment(0)}, check=False).returncode
