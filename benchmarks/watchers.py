"""Whoever watches a run on a cluster, on this machine: a Prometheus that scrapes every process, and a collector of traces.

Prometheus is the real one (`python tools/fetch_test_servers.py prometheus`). The collector is a process that takes OTLP over
gRPC and drops it unread: a real one is no Python program, so what it does with spans would say nothing here.

    python -m benchmarks.watchers     # the collector alone: prints its address, and at its end how much came
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

ROOT = Path(__file__).resolve().parents[1]
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PROMETHEUS = Path(sys.prefix) / "servers" / "prometheus" / "usr" / "bin" / "prometheus"
SCRAPE = "5s"  # the charts say 15 s


class Watchers:
    """A Prometheus and a collector that run."""

    def __init__(self, targets: Path, collector: str) -> None:
        self._targets, self.collector = targets, collector

    def look_at(self, run: Path) -> None:
        """Scrape the processes of this run from now on."""
        files = [json.loads(path.read_text()) for path in (run / "services").glob("[!.]*.json")]
        addresses = [file["metrics_address"] for file in files if file.get("metrics_address")]
        temporary = self._targets.with_suffix(".new")
        temporary.write_text(json.dumps([{"targets": addresses, "labels": {"namespace": "laptop"}}]))
        temporary.replace(self._targets)


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[Watchers]:
    """Both, for as long as the block lasts. Raises SystemExit when there is no Prometheus."""
    if not PROMETHEUS.exists():
        raise SystemExit("no Prometheus: python tools/fetch_test_servers.py prometheus")
    targets, rules = folder / "targets.json", ROOT / "helm" / "monitoring" / "rules.yaml"
    targets.write_text("[]")
    (folder / "prometheus.json").write_text(json.dumps({
        "global": {"scrape_interval": SCRAPE, "evaluation_interval": "15s"}, "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "slipstream", "file_sd_configs": [{"files": [str(targets)]}]}]}))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "prometheus.log").open("wb"))
        _running(stack, [
            str(PROMETHEUS), f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
        collector = _running(
            stack, [sys.executable, "-m", "benchmarks.watchers"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert collector.stdout is not None
        yield Watchers(targets, collector.stdout.readline().strip())


def _running(stack: contextlib.ExitStack, command: list[str], **how: Any) -> subprocess.Popen[Any]:
    process = subprocess.Popen(command, **how)

    def end() -> None:
        process.terminate()
        process.wait(30)

    stack.callback(end)
    return process


class _Drop(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def take(request: bytes, context: Any) -> bytes:
            self.messages, self.bytes = self.messages + 1, self.bytes + len(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(take) if handler_call_details.method == EXPORT else None


async def _collect() -> None:
    server, dropped, stop = grpc.aio.server(), _Drop(), asyncio.Event()
    server.add_generic_rpc_handlers((dropped,))
    port = server.add_insecure_port("127.0.0.1:0")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(1)
    print(f"{dropped.messages} messages, {dropped.bytes} bytes", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(_collect())
