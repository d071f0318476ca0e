"""What it costs to be locked down and watched: the demo with everything on, over the demo as it is on a laptop.

    python -m benchmarks.security --json FILE [--steps 80] [--seeds 3] [--calls 2000] [--share 0.01] [--apart]

Arms, interleaved seed by seed, each seed in the other order, so that a slow minute of the machine hits both:

    off      plaintext on loopback; role tokens of the run's secret, as `make demo` has them; nobody scrapes, no traces
    on       every service behind mutual TLS, roles by certificate, secrets read again, content kept out of logs; a Prometheus
             that scrapes every process and evaluates the rules; traces of a share of the samples to a collector
    tls      with --apart also the certificates alone,
    watched  and Prometheus and traces alone

Time of a step: (time of the last step - time of step SKIP) / steps between, from each run's own step log; start and warm-up are
outside. Figures are medians over seeds:

    throughput_on_over_off  step time off / step time on, within a seed; 1 = free, 0.9 = the most that is acceptable
    cpu_on_over_off         CPU of all processes a step, which hardly depends on what else the machine does; Prometheus and the
                            collector, which are elsewhere on a cluster, are not in it, but take their part of the throughput
    call_ms_off, call_ms_on one small call after the other, channel and server in one process
    large_ms_off, ..._on    the same with 4 MiB up
    handshake_ms            a new connection with its first call
    reward_off, reward_on   mean reward of the last ten steps: what is learned does not depend on it
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks.cost import cpu_s
from benchmarks.overlap import DEMO, ROOT
from benchmarks.record import publish
from benchmarks.watchers import Watchers, watching
from slipstream import auth, auth_credentials, rpc, tls_authority
from slipstream.auth_credentials import Credentials
from slipstream.cli.metrics import parse
from slipstream.tls import Certificates

SKIP, WINDOW = 10, 10
ECHO = "/slipstream.types.v1.StatusService/GetStatus"  # a method that every role may call
LARGE = 4 << 20


ARMS = {"off": (False, False), "on": (True, True), "tls": (True, False), "watched": (False, True)}  # certificates, watchers


def one_run(folder: Path, arm: str, steps: int, seed: int, share: float) -> dict[str, float]:
    """Milliseconds and CPU milliseconds a step, and the last reward, of one `slipstream run`."""
    with contextlib.ExitStack() as stack:
        locked, watched = ARMS[arm]
        here = folder / f"{arm}-{seed}"
        here.mkdir()
        settings: dict[str, object] = {"security.tls_dir": folder / "certs"} if locked else {}
        watchers = stack.enter_context(watching(here)) if watched else None
        if watchers is not None:
            settings |= {"tracing.endpoint": watchers.collector, "tracing.sample_share": share}
        return _measured(here / "run", steps, {"run.seed": seed, **settings}, watchers)


def _measured(run: Path, steps: int, settings: dict[str, object], watchers: Watchers | None) -> dict[str, float]:
    command = [sys.executable, "-m", "slipstream.cli", "run", str(DEMO), "--plain"]
    settings |= {"run.folder": run, "run.steps": steps + 1, "run.target_reward": 2.0}
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        rows = _wait(run, process, SKIP)
        if watchers is not None:
            watchers.look_at(run)
        before, first = sum(cpu_s(str(run)).values()), len(rows)
        rows = _wait(run, process, steps)
        cpu_ms = (sum(cpu_s(str(run)).values()) - before) * 1000 / (len(rows) - first)
    finally:
        process.terminate()
        process.wait(120)
    seconds = rows[-1]["time_unix"] - rows[first - 1]["time_unix"]
    return {
        "step_ms": seconds * 1000 / (len(rows) - first), "cpu_ms": cpu_ms,
        "reward": statistics.fmean(row["reward_mean"] for row in rows[-WINDOW:])}


def _wait(run: Path, process: subprocess.Popen[bytes], steps: int) -> list[dict[str, Any]]:
    """The step log once it has so many lines. Raises SystemExit when the run ends before."""
    path = run / "metrics.jsonl"
    while True:
        lines = path.read_bytes().splitlines() if path.exists() else []
        if len(lines) >= steps:
            return [row for row in map(parse, lines) if row]
        if process.poll() is not None:
            raise SystemExit(f"the run in {run} ended before step {steps}: see {run / 'logs'}")
        time.sleep(0.05)


class _Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(answer) if handler_call_details.method == ECHO else None


def _register(servicer: object, server: Any) -> None:
    server.add_generic_rpc_handlers((_Echo(),))


async def calls(folder: Path, count: int) -> dict[str, float]:
    """Median milliseconds of a call, with a run's secret and with certificates by turns, and of a handshake."""
    arms = {
        "off": tuple(auth_credentials.fixed(b"s" * 32, role) for role in ("buffer", "rollout")),
        "on": tuple(Credentials(role, "demo", certificates=Certificates(folder, role)) for role in ("buffer", "rollout"))}
    found: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        methods = {}
        for name, (server, client) in arms.items():
            running = await stack.enter_async_context(rpc.Server("127.0.0.1", 0, [(_register, None)], credentials=server))
            channel = await stack.enter_async_context(rpc.channel(running.address, credentials=client))
            methods[name] = channel.unary_unary(ECHO)
            if name == "on":
                found["handshake_ms"] = await _handshakes(running.address, client)
        for kind, request, times in (("call", b"", count), ("large", bytes(LARGE), max(1, count // 100))):
            spent: dict[str, list[float]] = {name: [] for name in methods}
            for _ in range(times):
                for name, method in methods.items():
                    started = time.perf_counter()
                    await method(request, timeout=30)
                    spent[name].append(time.perf_counter() - started)
            found |= {f"{kind}_ms_{name}": statistics.median(seconds) * 1000 for name, seconds in spent.items()}
    return found


async def _handshakes(address: str, client: Credentials) -> float:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        async with rpc.channel(address, credentials=client) as channel:
            await channel.unary_unary(ECHO)(b"", timeout=10)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3, help="0 = calls only")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--share", type=float, default=0.01, help="of the samples that are traced")
    parser.add_argument("--apart", action="store_true", help="also certificates alone, and watchers alone")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = tls_authority.create_authority()
        for role in auth.ROLES:
            tls_authority.issue(authority, folder / "certs" / role, role)
        figures: dict[str, Any] = asyncio.run(calls(folder / "certs", arguments.calls))
        arms = list(ARMS) if arguments.apart else ["off", "on"]
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
        for seed in range(arguments.seeds):
            for arm in arms if seed % 2 == 0 else reversed(arms):
                found[arm].append(one_run(folder, arm, arguments.steps, seed, arguments.share))
    figures["traced_share"] = arguments.share
    rows = [[n, f"{figures[f'{n}_ms_off']:.2f}", f"{figures[f'{n}_ms_on']:.2f}"] for n in ("call", "large")]
    if arguments.seeds:
        for arm in arms[1:]:
            pairs = list(zip(found["off"], found[arm], strict=True))
            figures[f"throughput_{arm}_over_off"] = statistics.median(a["step_ms"] / b["step_ms"] for a, b in pairs)
            figures[f"cpu_{arm}_over_off"] = statistics.median(b["cpu_ms"] / a["cpu_ms"] for a, b in pairs)
        for key in ("step_ms", "cpu_ms", "reward"):
            figures |= {f"{key}_{arm}": statistics.median(run[key] for run in found[arm]) for arm in arms}
            rows.append([key, *(f"{figures[f'{key}_{arm}']:.2f}" for arm in arms)])
    rows = [row + [""] * (1 + len(arms) - len(row)) for row in rows]
    publish("The demo with nothing on, and locked down and watched", ["", *arms], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
