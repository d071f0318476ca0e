"""Every query that people or autoscalers rely on is answered by a real Prometheus that scrapes a real run.

Every panel shows something; what every alert compares is there, and compared; the charts' KEDA queries follow what is done to
the run. A query that finds nothing looks at a metric that nobody exports, or joins series whose labels do not match.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import model_dir as model_dir  # a fixture
from tests.monitoring import live
from tests.monitoring.prometheus import Prometheus, queries, scaled_object, until
from tests.monitoring.test_rules import ALERTS, RULES

pytestmark = pytest.mark.timeout(900)
# Alerts whose expression finds nothing as long as all is well, whatever is compared.
BY_DESIGN = {"SlipstreamBufferAbsent": "workers without a buffer: the buffer is there"}
PATIENCE_S = 45.0
SERIES = re.compile(r"(slipstream[a-z_:]*[a-z0-9_]+|efa_[a-z_]+)(\{[^}]*\})?(\[\w+\])?( offset \w+)?")


@pytest.fixture(scope="module")
def watched(
    programs: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest,
) -> Iterator[tuple[Prometheus, live.LiveRun]]:
    with live.watched(programs, tmp_path_factory.mktemp("live"), request.getfixturevalue("model_dir")()) as found:
        yield found


def answered(server: Prometheus, expressions: dict[str, str]) -> None:
    """Each finds something, soon: some are of what happens now and then."""
    missing = dict(expressions)

    def none_missing() -> bool:
        for name in [name for name, expression in missing.items() if server.ask(expression)]:
            del missing[name]
        return not missing

    try:
        until(none_missing, PATIENCE_S, "")
    except AssertionError:
        pytest.fail("\n".join(f"{name}: {expression}" for name, expression in missing.items()))


def panels() -> dict[str, str]:
    found = {}
    for path in sorted(Path("helm/monitoring/dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"].replace("$namespace", ".*").replace("$hourly", "1.5")
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = expression
    return found


def compared(expression: str) -> str:
    """The expression with comparisons that answer 0 or 1 instead of leaving out."""
    return re.sub(r"\s(==|>=|<=|>|<)\s", r" \1 bool ", expression)


def test_every_panel_shows_something(watched: tuple[Prometheus, live.LiveRun]) -> None:
    answered(watched[0], panels())


def test_every_alert_has_what_it_compares(watched: tuple[Prometheus, live.LiveRun]) -> None:
    """Each series that it names is there, each by itself, and so is the outcome of the comparison of all."""
    series = {
        f"{name}: {found[0]}": f"{found[1]}{found[2] or ''}{found[4] or ''}"
        for name, rule in ALERTS.items() for found in SERIES.finditer(rule["expr"])}
    assert len(series) > 25
    answered(watched[0], series)
    answered(watched[0], {name: compared(rule["expr"]) for name, rule in ALERTS.items() if name not in BY_DESIGN})


def test_every_recording_is_there(watched: tuple[Prometheus, live.LiveRun]) -> None:
    answered(watched[0], {r["record"]: r["record"] for r in RULES if "record" in r})


def test_rules_are_evaluated_and_nothing_fires(watched: tuple[Prometheus, live.LiveRun]) -> None:
    """A worker that was killed, an environment that fails now and then and a stranger are no reason to wake anybody."""
    rules = [r for g in watched[0].get("rules")["groups"] for r in g["rules"]]
    assert len(rules) == len(RULES) and not [r["lastError"] for r in rules if r.get("lastError")]
    assert not [r["name"] for r in rules if r.get("state") == "firing"]


def test_the_queries_of_the_charts_follow_the_run(watched: tuple[Prometheus, live.LiveRun]) -> None:
    """As KEDA asks them. Trainer stopped: the buffer fills and nothing more is wanted. Workers stopped: all is wanted that the
    budget allows. Reward workers stopped: the backlog grows, and goes when they are back. An environment counts episodes."""
    server, run = watched
    rollout = queries(scaled_object("rollout", live.RUN, "autoscaling.kvShare=0.8"))
    floor = queries(scaled_object("rollout", live.RUN, "spot.onDemandReplicas=1", "autoscaling.perReplica=8"))
    wanted, backlog = rollout["wanted-samples"], queries(scaled_object("reward", live.RUN))["backlog"]
    episodes = queries(scaled_object("environment", live.RUN))["episodes"]

    def becomes(query: str, low: float, high: float) -> None:
        until(lambda: (found := server.keda(query)) is not None and low <= found <= high, 60, f"{query}: {server.ask(query)}")

    schedule = run.run.schedule
    budget = (schedule.max_lag + 1) * schedule.groups_per_batch * schedule.group_size
    run.signal("trainer-0", signal.SIGSTOP)
    becomes(wanted, 0, 0)
    becomes(floor["wanted-samples"], 0, 0)
    run.signal("rollout-0", signal.SIGSTOP)
    run.signal("trainer-0", signal.SIGCONT)
    becomes(wanted, schedule.group_size, budget)
    becomes(floor["wanted-samples"], 0, budget - 8)
    run.signal("reward-0", signal.SIGSTOP)
    run.signal("rollout-0", signal.SIGCONT)
    becomes(backlog, 1, budget)
    run.signal("reward-0", signal.SIGCONT)
    becomes(backlog, 0, 0)
    run.open_episodes(7)
    becomes(episodes, 7, 7 + 2 * budget)
    becomes(rollout["kv-cache"], 0, 1)


def test_the_dashboards_are_those_of_the_generator() -> None:
    subprocess.run([sys.executable, "tools/generate_dashboards.py", "--check"], check=True)
