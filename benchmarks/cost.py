"""Where a step's CPU time goes: milliseconds of CPU per optimizer step of every process of the demo.

    python -m benchmarks.cost --json FILE [--steps 80] [--set buffer.durability=memory] [--set schedule.max_lag=2]

Linux only (reads /proc). CPU time, unlike wall time, hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.overlap import DEMO, ROOT
from benchmarks.record import publish

PROCESSES = {
    "services.buffer": "buffer",
    "services.reward": "reward",
    "services.rollout": "rollout",
    "services.trainer": "trainer",
    "valkey-server": "redis",
    "redis-server": "redis",
    "slipstream.cli run": "supervisor",
}
SKIP = 15


def cpu_s(folder: str) -> dict[str, float]:
    """CPU seconds so far of each process that has the run folder in its command line."""
    found: dict[str, float] = dict.fromkeys(PROCESSES.values(), 0.0)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_text().replace("\0", " ")
                name = next((name for part, name in PROCESSES.items() if part in command), "")
                if name and folder in command:
                    found[name] += process_cpu_s(int(entry.name))
    return found


def process_cpu_s(pid: int) -> float:
    """CPU seconds so far of one process, user and system. Raises OSError when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps(folder: str) -> int:
    """Steps trained so far."""
    path = Path(folder, "metrics.jsonl")
    return len(path.read_text().splitlines()) if path.exists() else 0


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--plain"]
        settings = [f"run.folder={folder}/run", f"run.steps={arguments.steps + 10}", "run.target_reward=2.0", *arguments.set]
        for setting in settings:
            command += ["--set", setting]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while steps(f"{folder}/run") < SKIP and process.poll() is None:
                time.sleep(0.2)
            first, before, started = steps(f"{folder}/run"), cpu_s(folder), time.monotonic()
            while steps(f"{folder}/run") < arguments.steps and process.poll() is None:
                time.sleep(0.2)
            count, after = steps(f"{folder}/run") - first, cpu_s(folder)
            wall_ms = (time.monotonic() - started) * 1000 / count
        finally:
            process.terminate()
            process.wait(60)
    cost = {name: (after[name] - before[name]) * 1000 / count for name in before}
    figures = {f"{name}_cpu_ms": value for name, value in cost.items()} | {
        "sum_cpu_ms": sum(cost.values()),
        "wall_ms": wall_ms,
        "settings": " ".join(arguments.set),
    }
    publish("CPU ms per step", ["process", "ms"], [[n, f"{v:.0f}"] for n, v in cost.items()], figures, arguments.json)


if __name__ == "__main__":
    main()
