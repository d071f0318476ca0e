"""Servers that tests run on, from Debian's packages, unpacked beside the environment. Needs no root.

    python tools/fetch_test_servers.py               # <sys.prefix>/servers/redis-7.0: the ledger's suite runs on it, too
    python tools/fetch_test_servers.py prometheus    # <sys.prefix>/servers/prometheus, with promtool: for make test-monitoring

The packages come from the machine's own apt sources (`apt-get download`, `dpkg -x`); package lists that only root may refresh
are read into a folder of our own when they are missing. Without apt, or offline, it says so and ends with 0: the tests on that
server are then skipped, by the names in .ci/allowed-skips. The other two servers are pip packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """What is fetched: Debian packages, libraries that the machine may lack, and how the right version is known."""

    folder: str
    program: str
    packages: tuple[str, ...]
    libraries: tuple[str, ...]
    version: str  # pattern of what --version says

    @property
    def target(self) -> Path:
        return Path(sys.prefix) / "servers" / self.folder


SERVERS = {
    "redis": Server(
        "redis-7.0", "usr/bin/redis-server", ("redis-tools", "redis-server"),
        ("libjemalloc2", "liblzf1", "libatomic1", "libssl3", "libsystemd0"), r"v=(7\.\S+)"),
    "prometheus": Server("prometheus", "usr/bin/prometheus", ("prometheus",), (), r"version (\d+\.\S+)"),
}


class Unfetched(Exception):
    """Why there is no server, in one line."""


def main(name: str = "redis") -> int:
    """Fetch unless it is there. Always 0: what is absent is reported."""
    server = SERVERS[name]
    if (server.target / server.program).exists():
        return 0
    try:
        with tempfile.TemporaryDirectory() as scratch:
            fresh = Path(scratch) / "root"
            fetch(server, Path(scratch), fresh)
            told = run([str(fresh / server.program), "--version"], Path(scratch), library_folder(fresh))
            if not (version := re.search(server.version, told)):
                raise Unfetched(f"apt offers another version: {told.strip()}")
            server.target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(fresh, server.target, symlinks=True, dirs_exist_ok=True)
    except Unfetched as reason:
        print(f"test servers: no {name}, its tests cannot run: {reason}")
    else:
        print(f"test servers: {name} {version[1]} in {server.target}")
    return 0


def fetch(server: Server, scratch: Path, root: Path) -> None:
    """Packages and, where this machine lacks them, libraries."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Unfetched("apt-get and dpkg are not here")
    options: list[str] = []
    try:
        download(scratch, server.packages, options)
    except Unfetched:
        options = private_lists(scratch)
        download(scratch, server.packages, options)
    for package in server.libraries:
        if not any(scratch.glob(f"{package}_*.deb")):
            download(scratch, [package], options)
    for package in scratch.glob("*.deb"):
        run(["dpkg", "-x", str(package), str(root)], scratch)


def download(scratch: Path, packages: tuple[str, ...] | list[str], options: list[str]) -> None:
    run(["apt-get", "-q", *options, "download", *packages], scratch)


def private_lists(scratch: Path) -> list[str]:
    """Package lists in a folder of our own, from the machine's sources."""
    for part in ("lists/partial", "cache/archives/partial"):
        (scratch / part).mkdir(parents=True)
    options = [
        f"-oDir::State::lists={scratch / 'lists'}", f"-oDir::Cache={scratch / 'cache'}", "-oAPT::Sandbox::User=",
        "-oAcquire::http::Timeout=20", "-oAcquire::Retries=1"]
    run(["apt-get", "-q", *options, "update"], scratch)
    return options


def library_folder(root: Path) -> dict[str, str]:
    """The environment in which the unpacked server finds its libraries."""
    return {"LD_LIBRARY_PATH": ":".join(str(path) for path in sorted(root.glob("usr/lib/*-linux-gnu")))}


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """Output of a command. Raises Unfetched with its last line."""
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True,
            text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unfetched(str(error)) from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unfetched(f"{' '.join(command[:1])}: {told[-1]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
