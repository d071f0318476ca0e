"""What asynchrony gains, and what the services cost, on the demo's task.

    python -m benchmarks.overlap --json FILE [--steps 80] [--seeds 3]

Arms, all with the same kernels (deterministic = false), interleaved seed by seed:

    lag 0, lag 1, lag 2     the real thing: five processes and Redis, `slipstream run`, durability as --durability says
    sync 1, sync 2          one process that generates and trains by turns, with one or two threads (benchmarks/bare.py)
    bare lag 1              generator and trainer as two processes and two pipes, without any service (benchmarks/bare.py)

Time of a step: (time of the last step - time of step `SKIP`) / steps between, from each arm's own step log; imports and warm-up
are outside. Figures are medians over seeds of ratios within a seed.

    async_over_lag0         lag 0 / best of lag 1 and lag 2
    async_over_best_sync    best of sync 1 and sync 2 / best of lag 1 and lag 2
    bound                   (wait + train) / max(wait, train) of lag 0, where `wait` is generation with all service time in it:
                            what perfect overlap of these two would give
    service_overhead        lag 1 / bare lag 1 - 1
    final_reward_*          mean reward of the last ten steps
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.record import publish

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "sort-digits" / "run.toml"
SKIP = 10
WINDOW = 10


def service_arm(folder: Path, steps: int, seed: int, lag: int, durability: str) -> list[dict]:
    """The step log of a run with all services."""
    overrides = {
        "run.folder": folder / "run",
        "run.steps": steps,
        "run.seed": seed,
        "run.target_reward": 2.0,
        "schedule.max_lag": lag,
        "schedule.deterministic": "false",
        "buffer.durability": durability,
    }
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--plain"]
    for name, value in overrides.items():
        command += ["--set", f"{name}={value}"]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=900)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def bare_arm(folder: Path, steps: int, seed: int, *arguments: str) -> list[dict]:
    """The step log of a loop without services."""
    resolved = subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream.cli",
            "run",
            str(DEMO),
            "--dry-run",
            "--set",
            f"run.steps={steps}",
            "--set",
            f"run.seed={seed}",
            "--set",
            "schedule.deterministic=false",
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (folder / "run.toml").write_text(resolved.stdout)
    out = folder / "out.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.bare", str(folder / "run.toml"), str(out), *arguments],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=900,
        env={**os.environ, "OMP_WAIT_POLICY": "ACTIVE"},
    )
    data = json.loads(out.read_text())
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


ARMS = {
    "lag 0": lambda folder, a, seed: service_arm(folder, a.steps, seed, 0, a.durability),
    "lag 1": lambda folder, a, seed: service_arm(folder, a.steps, seed, 1, a.durability),
    "lag 2": lambda folder, a, seed: service_arm(folder, a.steps, seed, 2, a.durability),
    "sync 1": lambda folder, a, seed: bare_arm(folder, a.steps, seed, "sync", "--threads", "1"),
    "sync 2": lambda folder, a, seed: bare_arm(folder, a.steps, seed, "sync", "--threads", "2"),
    "bare lag 1": lambda folder, a, seed: bare_arm(folder, a.steps, seed, "two-processes", "--lag", "1"),
}


def step_ms(log: list[dict]) -> float:
    """Milliseconds of a step in steady state."""
    return (log[-1]["time_unix"] - log[SKIP - 1]["time_unix"]) / (len(log) - SKIP) * 1000


def reward(log: list[dict]) -> float:
    """Mean reward of the last steps."""
    return statistics.fmean(line["reward_mean"] for line in log[-WINDOW:])


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--durability", default="always", choices=["always", "everysec", "memory"])
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    logs: dict[tuple[str, int], list[dict]] = {}
    for seed in range(arguments.seeds):
        for name, arm in ARMS.items():
            with tempfile.TemporaryDirectory() as folder:
                log = logs[name, seed] = arm(Path(folder), arguments, seed)
            print(f"seed {seed}  {name:10}  {step_ms(log):7.1f} ms/step  reward {reward(log):.2f}", flush=True)
    seeds = range(arguments.seeds)
    ms = {key: step_ms(log) for key, log in logs.items()}
    fast = {s: min(ms["lag 1", s], ms["lag 2", s]) for s in seeds}
    waits = [logs["lag 0", s][SKIP:] for s in seeds]
    parts = [(statistics.fmean(x["wait_s"] for x in w), statistics.fmean(x["step_s"] for x in w)) for w in waits]
    figures = {
        "async_over_lag0": statistics.median(ms["lag 0", s] / fast[s] for s in seeds),
        "async_over_best_sync": statistics.median(min(ms["sync 1", s], ms["sync 2", s]) / fast[s] for s in seeds),
        "bound": statistics.median((w + t) / max(w, t) for w, t in parts),
        "service_overhead": statistics.median(ms["lag 1", s] / ms["bare lag 1", s] - 1 for s in seeds),
        "final_reward_async": statistics.fmean(reward(logs["lag 1", s]) for s in seeds),
        "final_reward_sync": statistics.fmean(reward(logs["sync 1", s]) for s in seeds),
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "durability": arguments.durability,
    }
    rows = [
        [name, *(f"{ms[name, s]:.0f}" for s in seeds), f"{statistics.fmean(reward(logs[name, s]) for s in seeds):.2f}"]
        for name in ARMS
    ]
    publish("ms per step", ["arm", *(f"seed {s}" for s in seeds), "final reward"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
