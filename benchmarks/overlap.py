"""What asynchrony gains, and what the services cost, on the demo's task.

    python -m benchmarks.overlap --json FILE [--steps 60] [--seeds 3] [--slice 1]
    python -m benchmarks.overlap --share [--set model.build.config.hidden_size=192]    the services' share alone, of another run

Arms, all with the same kernels (deterministic = false):

    lag 0, lag 1, lag 2     the real thing: five processes and Redis, `slipstream run`, durability as --durability says
    sync 1, sync 2          one process that generates and trains by turns, with one or two threads (benchmarks/bare.py)
    bare lag 1              generator and trainer as two processes and two pipes, without any service (benchmarks/bare.py)

Of each seed the first five are started, take their imports, warm-up and first steps, and stand still; then they run by turns,
for a slice each, until all have done the same steps (benchmarks/slices.py): what else the machine does meanwhile weighs on all
alike, and a step is compared with the same step, for they get shorter while the policy learns. Then `lag 1` again beside `bare
lag 1` alone: of who stands still five seconds of six, timers (heartbeats, polls) are due in each slice. Time of a step: that of
steps SKIP + 1 to --steps by the arm's own clock. Figures are medians over seeds of ratios within a seed.

    async_over_lag0         lag 0 / best of lag 1 and lag 2
    async_over_best_sync    best of sync 1 and sync 2 / best of lag 1 and lag 2
    bound                   (wait + train) / max(wait, train) of lag 0, where `wait` is generation with all service time in it:
                            what perfect overlap of these two would give
    service_overhead        lag 1 beside bare lag 1 / bare lag 1 - 1
    final_reward_*          mean reward of the last ten steps
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import publish
from benchmarks.slices import ROOT, Arm, started, take_turns

DEMO = ROOT / "examples" / "sort-digits" / "run.toml"
SKIP = 10
WINDOW = 10
BESIDE = "lag 1 beside bare"
FOREVER = 100_000  # steps that nobody gets to


def service_arm(folder: Path, seed: int, lag: int, durability: str, settings: Sequence[str] = ()) -> Arm:
    """A run with all services; `settings`, NAME=VALUE, are those of the run file."""
    overrides = {
        "run.folder": folder / "run",
        "run.steps": FOREVER,
        "run.seed": seed,
        "run.target_reward": 2.0,
        "schedule.max_lag": lag,
        "schedule.deterministic": "false",
        "buffer.durability": durability,
    }
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--plain"]
    for setting in (*(f"{name}={value}" for name, value in overrides.items()), *settings):
        command += ["--set", setting]
    return Arm(f"lag {lag}", command, folder / "run" / "metrics.jsonl")


def bare_arm(name: str, folder: Path, seed: int, *arguments: str, settings: Sequence[str] = ()) -> Arm:
    """A loop without services."""
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--dry-run"]
    for setting in (f"run.steps={FOREVER}", f"run.seed={seed}", "schedule.deterministic=false", *settings):
        command += ["--set", setting]
    resolved = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    run_file, log = folder / "run.toml", folder / "steps.jsonl"
    run_file.write_text(resolved.stdout)
    bare = [sys.executable, "-m", "benchmarks.bare", str(run_file), str(log), *arguments]
    return Arm(name, bare, log, OMP_WAIT_POLICY="ACTIVE")


def all_arms(folder: Path, seed: int, durability: str, settings: Sequence[str] = ()) -> list[list[Arm]]:
    """Those that run by turns, in folders of their own."""
    folders = [folder / str(i) for i in range(7)]
    for each in folders:
        each.mkdir()
    again = service_arm(folders[6], seed, 1, durability, settings)
    again.name = BESIDE
    return [
        [*(service_arm(folders[lag], seed, lag, durability, settings) for lag in range(3)),
         *(bare_arm(f"sync {n}", folders[2 + n], seed, "sync", "--threads", str(n), settings=settings) for n in (1, 2))],
        [again, bare_arm("bare lag 1", folders[5], seed, "two-processes", "--lag", "1", settings=settings)],
    ]


def step_ms(arm: Arm, steps: int) -> float:
    """Milliseconds of a step in steady state."""
    clock = arm.clock()
    return float(clock[steps - 1] - clock[SKIP - 1]) / (steps - SKIP) * 1000


def reward(log: list[dict], steps: int) -> float:
    """Mean reward of the last steps."""
    return statistics.fmean(line["reward_mean"] for line in log[steps - WINDOW : steps])


def figures(ms: dict[tuple[str, int], float], logs: dict[tuple[str, int], list[dict]], steps: int) -> dict[str, float]:
    """See the module's text."""
    seeds = sorted({seed for _, seed in ms})
    share = {"service_overhead": statistics.median(ms[BESIDE, s] / ms["bare lag 1", s] - 1 for s in seeds)}
    if ("lag 0", seeds[0]) not in ms:
        return share
    fast = {s: min(ms["lag 1", s], ms["lag 2", s]) for s in seeds}
    waits = [logs["lag 0", s][SKIP:steps] for s in seeds]
    parts = [[statistics.median(line[key] for line in lines) for key in ("wait_s", "step_s")] for lines in waits]
    return {
        "async_over_lag0": statistics.median(ms["lag 0", s] / fast[s] for s in seeds),
        "async_over_best_sync": statistics.median(min(ms["sync 1", s], ms["sync 2", s]) / fast[s] for s in seeds),
        "bound": statistics.median((w + t) / max(w, t) for w, t in parts),
        **share,
        "final_reward_async": statistics.fmean(reward(logs["lag 1", s], steps) for s in seeds),
        "final_reward_sync": statistics.fmean(reward(logs["sync 1", s], steps) for s in seeds),
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slice", type=float, default=1.0, help="seconds")
    parser.add_argument("--durability", default="always", choices=["always", "everysec", "memory"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    ms: dict[tuple[str, int], float] = {}
    logs: dict[tuple[str, int], list[dict]] = {}
    for seed in range(asked.seeds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            for arms in all_arms(Path(folder), seed, asked.durability, asked.set)[asked.share:]:
                with started(arms, SKIP):
                    take_turns(arms, asked.slice, asked.steps)
                for arm in arms:
                    ms[arm.name, seed], logs[arm.name, seed] = step_ms(arm, asked.steps), arm.log()
                told = ", ".join(f"{arm.name} {ms[arm.name, seed]:.0f}" for arm in arms)
                print(f"seed {seed}: {told} ms a step", flush=True)
    names = list(dict.fromkeys(name for name, _ in ms))
    seeds = range(asked.seeds)
    rows = [
        [name, *(f"{ms[name, s]:.0f}" for s in seeds),
         f"{statistics.fmean(reward(logs[name, s], asked.steps) for s in seeds):.2f}"] for name in names]
    conditions = {"steps": asked.steps, "seeds": asked.seeds, "slice_s": asked.slice, "durability": asked.durability}
    conditions |= {"settings": " ".join(asked.set)} if asked.set else {}
    publish("ms per step", ["arm", *(f"seed {s}" for s in seeds), "final reward"], rows,
            figures(ms, logs, asked.steps) | conditions, asked.json)


if __name__ == "__main__":
    main()
