"""Starts a real service whose connections lead through the fault proxies.

The supervisor of a chaos run is the real one, told to start `benchmarks.faults.services.X` where it would start `services.X`.
What runs here replaces the addresses on its own command line by those of the proxies, notes the true ones for the proxies, and
becomes the real service by exec, in the same process. Only where a fault is planted in the service's own behaviour is it
loaded here instead, after `plants.apply`.

Beside the run folder:
    faults.json            {"proxies": {"trainer": "127.0.0.1:4711", ..., "redis": "/tmp/x/redis.sock"}, "plant": ""}
    upstream/<proxy>       the true address behind a proxy
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path


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

    def upstream(self, proxy: str) -> Path:
        return self.folder / "upstream" / proxy

    def address_behind(self, proxy: str) -> str:
        """Where the true server is; empty before anybody said so."""
        path = self.upstream(proxy)
        return path.read_text() if path.exists() else ""

    def write_plan(self, proxies: dict[str, str], plant: str) -> None:
        """Say where the proxies are, before anything is started."""
        self.upstream("").mkdir(parents=True, exist_ok=True)
        self.plan.write_text(json.dumps({"proxies": proxies, "plant": plant}))

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
    if plan["plant"]:
        from benchmarks.faults import plants

        if plants.apply(plan["plant"], service):
            sys.argv[1:] = argv
            runpy.run_module(f"services.{service}", run_name="__main__", alter_sys=True)
            return
    os.execv(sys.executable, [sys.executable, "-m", f"services.{service}", *argv])
