"""A run for a Prometheus to look at: real processes, with all that has a metric, and with the accidents that are counted.

An environment over gRPC that fails now and then, a scorer of the user's, routes, traces; a worker that is killed, a caller who
is refused. Not there: EFA, whose exporter is played by a page with its series, and yesterday, which is written into Prometheus.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from slipstream import config, rpc, telemetry
from slipstream.auth_credentials import of
from slipstream.config import RunFile
from slipstream.environment import EpisodeReset, Task
from slipstream.environments.remote import RemoteEnvironment
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.buffer.v1.samples_pb2_grpc import SampleServiceStub
from slipstream.protos.types.v1.sample_pb2 import DrawId, Lease, SampleId
from tests.collector import Collector
from tests.e2e import runs
from tests.monitoring import prometheus
from tests.ports import free_port

SERVICES = {"buffer": "buffer", "rollout-0": "rollout", "reward-0": "reward", "trainer-0": "trainer"}
RUN = "test"


class LiveRun:
    """The run, its environment, and where their metrics are."""

    def __init__(self, folder: Path, model: Path, collector: str) -> None:
        self._metrics = free_port()
        self._environment, self.environment_address = self._serve(folder)
        path = runs.write_run_file(folder, model, {
            "run": {"steps": 100_000}, "rollout": {"lease_s": 2.0, "heartbeat_s": 0.5, "capture_routes": True},
            "schedule": {"max_lag": 2}, "tracing": {"endpoint": collector, "sample_share": 0.1},
            "reward": {"lease_s": 5.0}})
        data = json.loads(path.read_text())
        data["environments"] = [
            {"name": "failing", "address": self.environment_address, "scorer": "plain_loop:even_share"}]
        path.write_text(json.dumps(data))
        self.run: RunFile = runs.load(path)
        self._process = runs.start("run", str(path), "--plain")

    def _serve(self, folder: Path) -> tuple[subprocess.Popen[str], str]:
        with (folder / "environment.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.cli", "env", "serve", "tests.monitoring.live_environment:Failing",
                 "--metrics-port", str(self._metrics)],
                cwd=runs.ROOT, env=runs.ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        return process, process.stdout.readline().split()[-1]

    @property
    def files(self) -> dict[str, dict[str, object]]:
        """The service files of what runs."""
        assert self._process.poll() is None, self._process.communicate()[0]
        folder = self.run.folder / "services"
        found = {p.stem: json.loads(p.read_text()) for p in folder.glob("[!.]*.json")} if folder.exists() else {}
        return {name: content for name, content in found.items() if name in SERVICES}

    def targets(self) -> prometheus.Targets:
        """What is to be scraped, with the labels that the charts' PodMonitors give."""
        tier = {"rollout": "elastic"}
        found = {
            str(content["metrics_address"]): prometheus.labels(SERVICES[name], RUN, name, tier.get(SERVICES[name], ""))
            for name, content in self.files.items()}
        return {**found, f"127.0.0.1:{self._metrics}": prometheus.labels("environment", RUN, "environment-0")}

    def signal(self, instance: str, number: signal.Signals) -> None:
        """Send a signal to a process of the run."""
        pid = self.files[instance]["pid"]
        assert isinstance(pid, int)
        os.kill(pid, number)

    def steps(self) -> int:
        path = self.run.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def stop(self) -> None:
        for process in (self._process, self._environment):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()

    def intrude(self) -> None:
        """Hand in a sample that was never granted."""
        async def submit() -> None:
            async with rpc.channel(str(self.files["buffer"]["address"]), credentials=of(self.run, "rollout")) as channel:
                lease = Lease(attempt=1, sample=SampleId(draw=DrawId(number=10**6, ledger_epoch=1)))
                await rpc.call(SampleServiceStub(channel).SubmitSamples, samples_pb2.SubmitSamplesRequest(
                    worker="stranger", samples=[samples_pb2.SubmittedSample(lease=lease, failure="none of yours")]), 10)

        asyncio.run(submit())

    def open_episodes(self, count: int) -> None:
        """Begin episodes that nobody ends."""
        async def begin() -> None:
            settings = config.Environment(name="failing", address=self.environment_address)
            async with RemoteEnvironment(settings) as client:
                await client.reset([EpisodeReset(f"mine-{n}", Task(20 * n, n)) for n in range(count)])

        asyncio.run(begin())


def efa() -> str:
    """A page as the EFA exporter has; its address."""
    registry = CollectorRegistry()
    for name in ("efa_retrans_bytes", "efa_rdma_write_bytes", "efa_tx_bytes"):
        Gauge(name, "Bytes.", registry=registry).set(1e9)
    return telemetry.serve(registry)


def yesterday() -> str:
    """The reward of a run like this between two hours and 55 minutes ago, as OpenMetrics."""
    now = int(time.time())
    lines = [
        f'slipstream_trainer_reward_mean{{namespace="{prometheus.NAMESPACE}",run="{RUN}",pod="trainer-0"}} 0.3 {at}'
        for at in range(now - 7200, now - 3300, 60)]
    return "\n".join(["# TYPE slipstream_trainer_reward_mean gauge", *lines, "# EOF\n"])


@contextlib.contextmanager
def watched(programs: Path, folder: Path, model: Path) -> Iterator[tuple[prometheus.Prometheus, LiveRun]]:
    """The run and the Prometheus that looks at it, once a worker was killed and is back."""
    with Collector() as collector:
        run = LiveRun(folder, model, collector.address)
        try:
            prometheus.until(lambda: run.files.keys() == SERVICES.keys() and run.steps() > 3, 240, "no three steps")
            fabric = {efa(): {"namespace": prometheus.NAMESPACE, "run": RUN, "pod": "trainer-0", "job": "efa"}}
            rules = Path("helm/monitoring/rules.yaml")
            with prometheus.scraping(programs, folder, {**run.targets(), **fabric}, rules=rules, past=yesterday()) as server:
                before = run.files["rollout-0"]["pid"]
                run.signal("rollout-0", signal.SIGKILL)
                run.intrude()
                prometheus.until(
                    lambda: run.files.get("rollout-0", {}).get("pid", before) != before, 240, "the worker did not come back")
                server.scrape({**run.targets(), **fabric})
                steps = run.steps()
                prometheus.until(lambda: run.steps() > steps + 5, 240, "the run does not go on")
                yield server, run
        finally:
            run.stop()
