"""What asynchrony gains, and what the services cost, on the demo's task.

    python -m benchmarks.overlap --json FILE [--rounds 60] [--slice 1.5]

Arms, all with the same kernels (deterministic = false):

    lag 0, lag 1, lag 2     the real thing: five processes and Redis, `slipstream run`, durability as --durability says
    sync 1, sync 2          one process that generates and trains by turns, with one or two threads (benchmarks/bare.py)
    bare lag 1              generator and trainer as two processes and two pipes, without any service (benchmarks/bare.py)

All are started, take their imports, warm-up and first steps, and stand still; then they run by turns for a slice each
(benchmarks/slices.py). A figure is the median, over groups of ten rounds, of ratios within the group, so what else the machine
does meanwhile weighs on all arms alike.

    async_over_lag0         lag 0 / best of lag 1 and lag 2
    async_over_best_sync    best of sync 1 and sync 2 / best of lag 1 and lag 2
    bound                   (wait + train) / max(wait, train) of lag 0, where `wait` is generation with all service time in it:
                            what perfect overlap of these two would give
    service_overhead        lag 1 / bare lag 1 - 1
    final_reward_*          mean reward of ten steps, the last that all arms have done
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.record import publish
from benchmarks.slices import ROOT, Arm, started, step_ms, turn

DEMO = ROOT / "examples" / "sort-digits" / "run.toml"
SKIP = 10
WINDOW = 10
GROUP = 10
STEPS = 100_000  # nobody gets there


def service_arm(folder: Path, seed: int, lag: int, durability: str) -> Arm:
    """A run with all services."""
    overrides = {
        "run.folder": folder / "run",
        "run.steps": STEPS,
        "run.seed": seed,
        "run.target_reward": 2.0,
        "schedule.max_lag": lag,
        "schedule.deterministic": "false",
        "buffer.durability": durability,
    }
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--plain"]
    for name, value in overrides.items():
        command += ["--set", f"{name}={value}"]
    return Arm(f"lag {lag}", command, folder / "run" / "metrics.jsonl")


def bare_arm(name: str, folder: Path, seed: int, *arguments: str) -> Arm:
    """A loop without services."""
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--dry-run"]
    for setting in (f"run.steps={STEPS}", f"run.seed={seed}", "schedule.deterministic=false"):
        command += ["--set", setting]
    resolved = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    run_file, log = folder / "run.toml", folder / "steps.jsonl"
    run_file.write_text(resolved.stdout)
    bare = [sys.executable, "-m", "benchmarks.bare", str(run_file), str(log), *arguments]
    return Arm(name, bare, log, OMP_WAIT_POLICY="ACTIVE")


def all_arms(folder: Path, seed: int, durability: str) -> list[Arm]:
    """One of each, in folders of their own."""
    folders = [folder / str(i) for i in range(6)]
    for each in folders:
        each.mkdir()
    return [
        *(service_arm(folders[lag], seed, lag, durability) for lag in range(3)),
        *(bare_arm(f"sync {n}", folders[2 + n], seed, "sync", "--threads", str(n)) for n in (1, 2)),
        bare_arm("bare lag 1", folders[5], seed, "two-processes", "--lag", "1"),
    ]


def figures(arms: dict[str, Arm], ms: dict[str, np.ndarray]) -> dict[str, float]:
    """See the module's text."""
    fast = np.minimum(ms["lag 1"], ms["lag 2"])
    logs = {name: arm.log() for name, arm in arms.items()}
    last = min(map(len, logs.values()))
    reward = {name: statistics.fmean(line["reward_mean"] for line in log[last - WINDOW : last]) for name, log in logs.items()}
    waits = logs["lag 0"][SKIP:]
    wait, train = (statistics.median(line[key] for line in waits) for key in ("wait_s", "step_s"))
    return {
        "async_over_lag0": float(np.median(ms["lag 0"] / fast)),
        "async_over_best_sync": float(np.median(np.minimum(ms["sync 1"], ms["sync 2"]) / fast)),
        "bound": (wait + train) / max(wait, train),
        "service_overhead": float(np.median(ms["lag 1"] / ms["bare lag 1"])) - 1,
        "final_reward_async": reward["lag 1"],
        "final_reward_sync": reward["sync 1"],
        "reward_at_step": last,
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="slices of each arm, a multiple of ten")
    parser.add_argument("--slice", type=float, default=1.5, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--durability", default="always", choices=["always", "everysec", "memory"])
    parser.add_argument("--json", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arms = all_arms(Path(folder), asked.seed, asked.durability)
        with started(arms, SKIP):
            for done in range(1, asked.rounds + 1):
                turn(arms, asked.slice)
                if done % GROUP == 0:
                    now = step_ms(arms, GROUP, GROUP)
                    print("  ".join(f"{name} {value[0]:.0f}" for name, value in now.items()), "ms a step", flush=True)
        ms = step_ms(arms, asked.rounds, GROUP)
        told = figures({arm.name: arm for arm in arms}, ms)
    rows = [[name, f"{np.median(values):.0f}", f"{values.min():.0f}", f"{values.max():.0f}"] for name, values in ms.items()]
    conditions = {"rounds": asked.rounds, "slice_s": asked.slice, "durability": asked.durability}
    publish("ms per step", ["arm", "median", "least", "most"], rows, told | conditions, asked.json)


if __name__ == "__main__":
    main()
