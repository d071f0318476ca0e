"""Starts a real service whose connections lead through the fault proxies.

The supervisor of a chaos run is the real one, told to start `benchmarks.faults.services.X` where it would start `services.X`.
What runs here replaces the addresses on its own command line by those of the proxies, notes the true ones for the proxies, and
becomes the real service by exec, in the same process. Only where a fault is planted in the service's own behaviour is it
loaded here instead, after `plants.apply`. A service of another release is started from that release's files, with the run file
as the user wrote it: what the supervisor made of it names settings that the other release may not know.

Beside the run folder:
    faults.json            {"proxies": {"trainer": "127.0.0.1:4711", ..., "redis": "/tmp/x/redis.sock"}, "plant": "",
                            "releases": {"reward": "/path/to/files"}}; a service that is not there is of the working tree
    chaos.json             the run file
    upstream/<proxy>       the true address behind a proxy
    lives.jsonl            a line for each start of a service: {"service", "instance", "tree", "unix"}
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Site:
    """The folder of a chaos run: the run's own folder and what lies beside it."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def plan(self) -> Path:
        return self.folder / "faults.json"

    @property
    def run_file(self) -> Path:
        return self.folder / "chaos.json"

    @property
    def lives(self) -> Path:
        return self.folder / "lives.jsonl"

    def upstream(self, proxy: str) -> Path:
        return self.folder / "upstream" / proxy

    def address_behind(self, proxy: str) -> str:
        """Where the true server is; empty before anybody said so."""
        path = self.upstream(proxy)
        return path.read_text() if path.exists() else ""

    def write_plan(self, proxies: dict[str, str], plant: str) -> None:
        """Say where the proxies are, before anything is started."""
        self.upstream("").mkdir(parents=True, exist_ok=True)
        self.plan.write_text(json.dumps({"proxies": proxies, "plant": plant, "releases": {}}))

    def change_plan(self, **parts: Any) -> None:
        """Say something else from now on, whole or not at all: a service may just be reading it."""
        plan = json.loads(self.plan.read_text()) | parts
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(json.dumps(plan))
        temporary.replace(self.plan)

    def note_life(self, service: str, instance: str, tree: str) -> None:
        """A service starts; `tree` is empty for the working tree."""
        line = json.dumps({"service": service, "instance": instance, "tree": tree, "unix": time.time()})
        with self.lives.open("a") as file:
            file.write(line + "\n")

    def note(self, proxy: str, address: str) -> None:
        """Write the true address for the proxy, whole or not at all."""
        temporary = self.upstream(f".{proxy}.{os.getpid()}")
        temporary.write_text(address)
        temporary.replace(self.upstream(proxy))


def divert(service: str, argv: list[str], site: Site, proxies: dict[str, str]) -> list[str]:
    """The command line with the proxy's address in the place of the true one.

    >>> divert("reward", ["--buffer", "127.0.0.1:9"], site, {"reward": "127.0.0.1:5"})
    ['--buffer', '127.0.0.1:5']
    """
    option, proxy, scheme = ("--redis", "redis", "unix://") if service == "buffer" else ("--buffer", service, "")
    if proxy not in proxies:
        return argv
    at = argv.index(option) + 1
    site.note(proxy, argv[at].removeprefix(scheme))
    return [*argv[:at], scheme + proxies[proxy], *argv[at + 1:]]


def main(service: str) -> None:
    """Become the service."""
    argv = sys.argv[1:]
    site = Site(Path(argv[argv.index("--run-file") + 1]).parent.parent)
    plan = json.loads(site.plan.read_text())
    argv = divert(service, argv, site, plan["proxies"])
    tree = plan["releases"].get(service, "")
    site.note_life(service, argv[argv.index("--instance") + 1], tree)
    if plan["plant"]:
        from benchmarks.faults import plants

        if plants.apply(plan["plant"], service):
            sys.argv[1:] = argv
            runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
            return
    if tree:
        argv[argv.index("--run-file") + 1] = str(site.run_file)
        os.environ["PYTHONPATH"] = tree
        os.chdir(tree)  # what -m puts first
    os.execv(sys.executable, [sys.executable, "-m", f"services.{service}", *argv])
