"""A real Prometheus for tests: what it scrapes, what it is asked, and how KEDA would take the answer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.rendering import of_kind, render
from tests.ports import free_port

NAMESPACE = "runs"  # of charts that tests render
Targets = Mapping[str, Mapping[str, str]]  # host:port of /metrics -> its labels


class Prometheus:
    """Asks one."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self._targets = address, folder / "targets.json"

    def scrape(self, targets: Targets) -> None:
        """From now on these."""
        content = json.dumps([{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()])
        temporary = self._targets.with_suffix(".new")
        temporary.write_text(content)
        temporary.replace(self._targets)

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API. Fails the test for what it refuses."""
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters}: {error.read().decode()}")

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Result of an instant query."""
        return self.get("query", query=expression)["result"]

    def keda(self, query: str) -> float | None:
        """The answer as KEDA's prometheus trigger takes it, with ignoreNullValues = "false": no series is an error, which
        leaves the replicas as they are (None); several are one, too, and a fault of the query."""
        found = self.ask(query)
        assert len(found) <= 1, f"KEDA refuses several series: {query}: {found}"
        return float(found[0]["value"][1]) if found else None

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/-/ready", timeout=2) as reply:
                return reply.status == 200
        except OSError:
            return False


@contextlib.contextmanager
def scraping(
    programs: Path, folder: Path, targets: Targets, interval: str = "1s", rules: Path | None = None, past: str = "",
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these and evaluates these rules. `past`: what it knows from before, as OpenMetrics."""
    port = free_port()
    server = Prometheus(f"http://127.0.0.1:{port}", folder)
    server.scrape(targets)
    if past:
        (folder / "past.txt").write_text(past)
        subprocess.run(
            [str(programs / "promtool"), "tsdb", "create-blocks-from", "openmetrics", str(folder / "past.txt"),
             str(folder / "data")], check=True, capture_output=True, timeout=60)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "2s"},
        "rule_files": [str(rules.resolve())] if rules else [],
        "scrape_configs": [{"job_name": "slipstream", "file_sd_configs": [{"files": [str(folder / "targets.json")]}]}]}))
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [str(programs / "prometheus"), f"--config.file={folder / 'prometheus.yaml'}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        until(server.ready, 30, f"Prometheus did not start: see {folder / 'prometheus.log'}")
        yield server
    finally:
        process.terminate()
        process.wait(60)


def until(condition: Callable[[], Any], timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def scaled_object(chart: str, run: str, *values: str) -> dict[str, Any]:
    """The ScaledObject of a chart's release for a run."""
    [found] = of_kind(render(chart, f"run.name={run}", "autoscaling.enabled=true", *values), "ScaledObject")
    return found


def queries(scaled: dict[str, Any]) -> dict[str, str]:
    """What KEDA asks Prometheus for it, by the trigger's name."""
    return {t["name"]: t["metadata"]["query"] for t in scaled["spec"]["triggers"]}


def labels(chart: str, run: str, pod: str, tier: str = "") -> dict[str, str]:
    """Labels of a pod's series, as the chart's PodMonitor makes them."""
    [monitor] = of_kind(render(chart, f"run.name={run}", "metrics.podMonitor.enabled=true"), "PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    found = {"namespace": monitor["metadata"]["namespace"], "pod": pod}
    for relabeling in endpoint["relabelings"]:
        found[relabeling["targetLabel"]] = relabeling.get("replacement", tier)
    assert monitor["spec"]["jobLabel"] == "slipstream/role"  # a label of every pod: the chart's name
    return {name: value for name, value in (found | {"job": chart}).items() if value}
