"""`slipstream run`: from a run file to the last line, `reward 0.27 -> 0.84 in 180 steps, 41 s, lost 0, repeated 0`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slipstream.cli import preflight, run_folder, run_start
from slipstream.cli.audit import Audit, Balance, audit
from slipstream.cli.metrics import WINDOW, Metrics
from slipstream.cli.processes import Limits
from slipstream.cli.run_folder import RunFolder, read_json
from slipstream.cli.supervisor import Ending, Supervisor
from slipstream.cli.survey import Survey
from slipstream.cli.watch import Watcher
from slipstream.config import RunFile
from slipstream.errors import SlipstreamError
from slipstream.service_command import launch_environment


@dataclass(frozen=True)
class Options:
    """What the command line says beside the run file."""

    plain: bool = False
    fresh: bool = False
    debug: bool = False
    prefix: str = "services"  # package of the services; tests bring their own
    limits: Limits | None = None
    started: float = 0.0  # time.monotonic() of the command's start


def run(run_file: RunFile, options: Options) -> int:
    """Run it to its end; the exit code. Raises ConfigError for what can be known before anything is started."""
    preflight.model(run_file)
    preflight.packages(run_file)
    folder, lock = run_folder.lock(run_file)
    try:
        return asyncio.run(_run(run_file, folder, lock, options))
    finally:
        lock.release()


async def _run(run_file: RunFile, folder: RunFolder, lock: run_folder.RunLock, options: Options) -> int:
    await preflight.check(run_file)
    if run_start.lay_out(folder, run_file, options.fresh) is run_start.Start.FINISHED:
        print(f"slipstream: {run_file.run.name} is finished: nothing is trained, its end is told again", file=sys.stderr,
              flush=True)
    before = _steps(folder)
    host, port = preflight.buffer_host_port(run_file)
    resolved = run_folder.write_run_file(folder, run_file, f"{host}:{port or preflight.free_port(host)}")
    environment = {**os.environ, **launch_environment()} | ({"SLIPSTREAM_DEBUG": "1"} if options.debug else {})
    balances: list[Balance] = []

    async def inspect() -> None:
        balances.extend(await ask_balance(folder, resolved))

    survey = Survey(folder)
    supervisor = Supervisor(resolved, folder, lock, environment=environment, prefix=options.prefix, limits=options.limits,
                            inspect=inspect, ask=survey.ask_all)
    console = Console()
    watcher = Watcher(folder, resolved, console)
    _on_signals(supervisor)
    showing = asyncio.create_task(_show(watcher, options.plain or not console.is_terminal), name="view")
    try:
        ending = await supervisor.run()
    finally:
        watcher.done.set()
        await asyncio.wait({showing}, timeout=10.0)
        await survey.close()
    balance = balances[-1] if balances else None
    return report(resolved, folder, ending, audit(folder.trained, balance), options.started, before, balance)


def _steps(folder: RunFolder) -> int:
    """The step that the run has come to."""
    metrics = Metrics(folder.metrics)
    metrics.poll()
    return metrics.step


async def _show(watcher: Watcher, plain: bool) -> None:
    """The view. A run outlives its view: a closed terminal or an error in drawing is said and nothing else."""
    try:
        await watcher.follow(plain)
    except Exception as error:
        with contextlib.suppress(OSError):
            print(f"slipstream: the view failed ({type(error).__name__}: {error}), the run goes on; `slipstream watch` opens "
                  "another", file=sys.stderr, flush=True)


def _on_signals(supervisor: Supervisor) -> None:
    """Ctrl-C, kill and a closed terminal stop the run; the second one at once."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.request_stop)


async def ask_balance(folder: RunFolder, run_file: RunFile) -> list[Balance]:
    """What the ledger says of its draws; empty when the buffer does not answer."""
    async with Survey(folder) as survey:
        try:
            figures = (await survey.ask(run_file.service.buffer_address)).figures
        except SlipstreamError:
            return []
    try:
        return [Balance(
            made=int(figures["draws"]) - _of_the_origin(folder, run_file, int(figures["lost_draws"])),
            dropped=int(figures["dropped_groups"]), open=int(figures["buffer_open_draws"]),
            numbered_batch=int(figures["numbered_batch"]), groups_per_batch=run_file.schedule.groups_per_batch,
            failed=int(figures.get("failed_groups", 0)))]
    except KeyError:
        return []


def _of_the_origin(folder: RunFolder, run_file: RunFile, unknown: int) -> int:
    """Draws of a fork's origin that are none of the fork's: made there, and not in a batch before the fork. `unknown` draws
    are older than this ledger."""
    fork = read_json(folder.fork)
    return max(0, min(unknown, fork["draws"]) - fork["step"] * run_file.schedule.groups_per_batch) if fork else 0


def report(
    run_file: RunFile, folder: RunFolder, ending: Ending, found: Audit, started: float, before: int = 0,
    balance: Balance | None = None,
) -> int:
    """Print where things are and the last line; the exit code. `before`: steps of earlier starts."""
    metrics = Metrics(folder.metrics)
    metrics.poll()
    name = display_name(folder)
    code = ending.code
    saved = any((folder.model / name).exists() for name in ("config.json", "adapter_config.json"))
    if metrics.step:
        if saved:
            print(f"model    {folder.model}")
        print(f"metrics  {folder.metrics}")
        print(f"logs     {folder.logs}")
        if saved:
            print(f'sample   {program()} generate {name} "{example_prompt(run_file)}"')
    if balance is not None and balance.failed:
        print(f"failed   {balance.failed} of {balance.made} groups: {program()} ledger {name} --dead")
    if ending.reason == "stopped":
        print(f"stopped at step {metrics.step} of {run_file.run.steps}: `{program()} run` with the same settings and without "
              "--fresh goes on from the last checkpoint")
    if ending.reason != "failed":
        code = code or verdict(run_file, metrics, found, ending.reason == "stopped")
    sys.stdout.flush()
    if ending.error:
        print(f"slipstream: {ending.error}", file=sys.stderr, flush=True)
    if rewards := metrics.first_and_last_reward:
        now, took = max(0, metrics.step - before), f"{time.monotonic() - started:.0f} s"
        share = took if not before else f"the last {now} of them in {took}" if now else "none of them now"
        print(f"reward {rewards[0]:.2f} -> {rewards[1]:.2f} in {metrics.step} steps, {share}, {found.sentence}", flush=True)
    return code


def verdict(run_file: RunFile, metrics: Metrics, found: Audit, stopped: bool = False) -> int:
    """0, or 1 with a line that says why the run is no success. Who stops it does not ask whether the target was reached."""
    target, rewards = run_file.run.target_reward, metrics.first_and_last_reward
    complaints = []
    if not stopped and target is not None and (rewards is None or rewards[1] < target):
        reached = "no step was trained" if rewards is None else f"the mean of the last {WINDOW} steps is {rewards[1]:.3f}"
        complaints.append(f"run.target_reward = {target:g} was not reached: {reached}")
    if metrics.step and not found.clean:
        complaints.append(f"the audit is not clean ({found.sentence}): see audit/trainer.jsonl and logs/buffer.log")
    failures: dict[str, int] = metrics.last.get("score_failures") or {}
    if failures and sum(failures.values()) == metrics.last.get("samples"):
        reason = max(failures, key=lambda r: failures[r])
        complaints.append(f"every score of the last step failed, most often with {reason!r}: see logs/reward-*.log")
    for complaint in complaints:
        print(f"slipstream: {complaint}", file=sys.stderr, flush=True)
    return 1 if complaints else 0


def display_name(folder: RunFolder) -> str:
    """How to name the run on a command line from here."""
    if folder.path.parent == Path("runs").resolve():
        return folder.path.name
    return os.path.relpath(folder.path) if folder.path.is_relative_to(Path.cwd()) else str(folder.path)


def program() -> str:
    """How to call this program from here: by its name where PATH has it, else by its path."""
    if shutil.which("slipstream") or Path(sys.argv[0]).name != "slipstream":
        return "slipstream"
    return os.path.relpath(sys.argv[0]) if Path(sys.argv[0]).is_relative_to(Path.cwd()) else sys.argv[0]


def example_prompt(run_file: RunFile) -> str:
    """A prompt of a built-in environment's kind, for the command that samples from the trained model."""
    from slipstream import environment as sdk

    settings = run_file.environments[0]
    if settings.entry.startswith("slipstream."):
        with contextlib.suppress(Exception):  # a hint for people: no reason to fail a finished run
            first = sdk.load(settings.entry, settings.args).reset(sdk.Task(0, 0))
            text = first if isinstance(first, str) else getattr(first, "text", None)
            if isinstance(text, str) and len(text) < 60 and '"' not in text:
                return text
    return "TEXT"
