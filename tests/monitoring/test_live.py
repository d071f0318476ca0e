"""Every query that people or autoscalers rely on is answered by a real Prometheus that scrapes a real run.

A query may be silent where the run lacks the thing (EFA, environments over gRPC, a stall); those are named here. Any other that
finds nothing looks at a metric that nobody exports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.test_rules import RULES
from tests.ports import free_port

# Part of a query -> why it may find nothing in this run.
SILENT = {
    "efa_": "no EFA here", "slipstream_environment_": "environments run in the workers", "_total{outcome=": "no such outcome",
    "rejected": "nothing was refused", "leases_expired": "no lease lapsed", "groups_dropped": "nothing was dropped",
    "staleness_gap": "no token was stale", "route_flip": "no routes are recorded", "offset 1h": "the run is minutes old",
    "waiting_seconds": "nobody waits now", "score_seconds": "built-in scorers", "unless on": "the buffer is there",
    "expert_load": "steps that are judged come later", "numeric_gap": "no token at lag 0", "call": "environments in process"}


class Prometheus:
    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Result of an instant query. Fails for one that Prometheus refuses."""
        url = f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                return json.load(reply)["data"]["result"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expression}: {error.read().decode()}")


@pytest.fixture(scope="module")
def prometheus(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A run of the demo, scraped every second, some steps in."""
    folder = tmp_path_factory.mktemp("live")
    run = folder / "run"
    changes = (f"run.folder={run}", "run.steps=100000", "model.build.config.num_hidden_layers=1", "trainer.warmup.steps=2")
    command = [sys.executable, "-m", "slipstream.cli", "run", "examples/sort-digits/run.toml", "--fresh"]
    command += [part for change in changes for part in ("--set", change)]
    with (folder / "run.log").open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    scraping = None
    try:
        targets = _targets(run, running)
        port = free_port()
        (folder / "prometheus.yaml").write_text(yaml.safe_dump({
            "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
            "rule_files": [str(Path("helm/monitoring/rules.yaml").resolve())],
            "scrape_configs": [{"job_name": "slipstream", "static_configs": [
                {"targets": [target], "labels": {"namespace": "laptop", "pod": name}} for name, target in targets.items()]}]}))
        with (folder / "prometheus.log").open("wb") as log:
            scraping = subprocess.Popen(
                [str(programs / "prometheus"), f"--config.file={folder / 'prometheus.yaml'}",
                 f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        server = Prometheus(f"http://127.0.0.1:{port}")
        _until(lambda: _ready(server) and _stepped(server), 120, f"no five steps were scraped; see {folder}")
        yield server
    finally:
        for process in (running, scraping):
            if process is not None:
                process.terminate()
                process.wait(60)


def _targets(run: Path, running: subprocess.Popen[bytes]) -> dict[str, str]:
    wanted = {"buffer", "rollout-0", "reward-0", "trainer-0"}

    def found() -> dict[str, str]:
        assert running.poll() is None, "the run ended"
        files = {p.stem: json.loads(p.read_text()) for p in (run / "services").glob("[!.]*.json")} if run.exists() else {}
        return {name: content["metrics_address"] for name, content in files.items() if name in wanted}

    _until(lambda: found().keys() == wanted, 120, "not all services came up")
    return found()


def _ready(server: Prometheus) -> bool:
    try:
        with urllib.request.urlopen(f"{server.address}/-/ready", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def _stepped(server: Prometheus) -> bool:
    found = server.ask("max (slipstream_trainer_step)")
    return bool(found) and float(found[0]["value"][1]) >= 5 and bool(server.ask("slipstream:trained_tokens:rate5m"))


def _until(condition: Any, timeout_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.2)


def _panels() -> list[tuple[str, str]]:
    found = []
    for path in sorted(Path("helm/monitoring/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$namespace", ".*").replace("$hourly", "1.5")
                found.append((f"{path.stem}: {panel['title']}", expression))
    return found


def _check(server: Prometheus, named: list[tuple[str, str]]) -> None:
    empty = [(name, e) for name, e in named if not server.ask(e) and not any(part in e for part in SILENT)]
    assert not empty, empty


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    _check(prometheus, _panels())


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    """An alert finds nothing while all is well; the series that it compares are there."""
    for rule in RULES:
        prometheus.ask(rule["expr"])
    with urllib.request.urlopen(f"{prometheus.address}/api/v1/rules", timeout=20) as reply:
        rules = [r for g in json.load(reply)["data"]["groups"] for r in g["rules"]]
    assert len(rules) == len(RULES) and not [r["lastError"] for r in rules if r.get("lastError")]
    assert not [r["name"] for r in rules if r.get("state") == "firing"]


def test_the_dashboards_are_those_of_the_generator() -> None:
    subprocess.run([sys.executable, "tools/generate_dashboards.py", "--check"], check=True)
