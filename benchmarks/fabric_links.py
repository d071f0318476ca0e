"""Two or more pretended nodes on one machine: network namespaces joined by slow links, with fast ones inside. Needs root.

    ns n0 [ranks 0..L-1, lo shaped to fast] ──veth shaped to slow──► router ns ──veth shaped to slow──► ns n1 ...

Ranks of a node share an address, so that they talk over their namespace's loopback. A token bucket's burst is bandwidth for
nothing: it is kept at 32 KB, which is to be at most 5 % of what a phase sends. netem is missing in many kernels and not used:
there is no added latency.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing as mp
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BURST = 32 << 10
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Links:
    """What is emulated."""

    nodes: int
    width: int  # ranks of a node
    slow_mbit: int
    fast_mbit: int
    prefix: str

    def namespace(self, node: int) -> str:
        return f"{self.prefix}n{node}"

    def address(self, node: int) -> str:
        return f"10.77.{node}.2"


def missing() -> str:
    """Why links cannot be emulated here; empty when they can."""
    if os.geteuid() != 0:
        return "root is needed for network namespaces"
    if lacking := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(lacking)} are missing (iproute2)"
    return ""


@contextlib.contextmanager
def emulated(links: Links) -> Iterator[None]:
    """Set up, and take down again whatever happens. Raises CalledProcessError with what `ip` or `tc` said."""
    router = f"{links.prefix}sw"
    names = [router, *(links.namespace(n) for n in range(links.nodes))]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for node in range(links.nodes):
            _node(links, node, router)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def on_ranks(links: Links, main: Callable[..., None], *arguments: Any) -> Any:
    """Run main(rank, links, *arguments, pipe) as each rank of the emulated nodes; what one of them sends through the pipe."""
    context = mp.get_context("fork")
    here, there = context.Pipe(duplex=False)
    with emulated(links):
        ranks = [context.Process(target=main, args=(rank, links, *arguments, there), daemon=True)
                 for rank in range(links.nodes * links.width)]
        try:
            for process in ranks:
                process.start()
            there.close()
            found = here.recv()
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                process.kill()
    return found


def enter(name: str) -> None:
    """Move this process into a namespace."""
    with Path(f"/run/netns/{name}").open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def sent_bytes(device: str = "eth0") -> int:
    """Bytes that left over a device of this process's namespace, headers and all."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() == device:
            return int(values.split()[8])
    raise LookupError(device)


def _node(links: Links, node: int, router: str) -> None:
    name, there = links.namespace(node), f"r{node}"
    _run("ip", "-n", name, "link", "add", "eth0", "mtu", "9000", "type", "veth", "peer", "name", there, "mtu", "9000",
         "netns", router)
    _run("ip", "-n", name, "addr", "add", f"{links.address(node)}/24", "dev", "eth0")
    _run("ip", "-n", router, "addr", "add", f"10.77.{node}.1/24", "dev", there)
    for namespace, device in ((name, "lo"), (name, "eth0"), (router, there)):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    _run("ip", "-n", name, "route", "add", "default", "via", f"10.77.{node}.1")
    _shape(name, "eth0", links.slow_mbit)
    _shape(router, there, links.slow_mbit)
    _shape(name, "lo", links.fast_mbit)


def _shape(namespace: str, device: str, mbit: int) -> None:
    burst = max(BURST, 70_000 if device == "lo" else 0)  # loopback hands over 64 KB at a time
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", str(burst),
         "latency", "200ms")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
