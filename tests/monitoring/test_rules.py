"""Every alert fires where it should and is silent where it should be; every alert has its runbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path("helm/monitoring")
RULES: list[dict[str, Any]] = [r for g in yaml.safe_load((CHART / "rules.yaml").read_text())["groups"] for r in g["rules"]]
ALERTS = {r["alert"]: r for r in RULES if "alert" in r}
# What makes each alert fire: series with their values every 30 s, for two and a half hours.
STORIES: dict[str, dict[str, str]] = {
    "SlipstreamStalled": {'slipstream_stalled{namespace="a", pod="trainer-0"}': "1x300"},
    "SlipstreamBufferAbsent": {'slipstream_build_info{namespace="a", service="rollout"}': "1x300",
                               'slipstream_build_info{namespace="b", service="buffer"}': "1x300"},
    "SlipstreamLedgerImbalance": {'slipstream_buffer_imbalance{namespace="a"}': "3x300"},
    "SlipstreamLagNearBound": {
        'slipstream_buffer_max_lag{namespace="a"}': "4x300", 'slipstream_trainer_lag_max{namespace="a"}': "4x300",
        'slipstream_trainer_lag_mean{namespace="a"}': "3.9x300"},
    "SlipstreamTrainingAlarm": {'slipstream_alarm{namespace="a", name="numeric_gap"}': "1x300"},
    "SlipstreamDropsGroups": {'slipstream_buffer_groups_dropped_total{namespace="a", reason="lag"}': "0+20x300",
                              'slipstream_trainer_groups_total{namespace="a"}': "0+64x300"},
    "SlipstreamDeadLetters": {'slipstream_buffer_samples_total{namespace="a", outcome="failed"}': "0+5x300"},
    "SlipstreamRewardCollapse": {'slipstream_trainer_reward_mean{namespace="a"}': "0.8x200 0.1x100"},
    "SlipstreamCanaryRefused": {'slipstream_rollout_swaps_total{namespace="a", outcome="canary"}': "0x275 1x25"},
    "SlipstreamVersionsNotLoaded": {'slipstream_rollout_swaps_total{namespace="a", outcome="failed"}': "0+1x300"},
    "SlipstreamLeasesExpire": {'slipstream_buffer_leases_expired_total{namespace="a", kind="sample"}': "0+200x300",
                               'slipstream_buffer_samples_total{namespace="a", outcome="accepted"}': "0+512x300"},
    "SlipstreamBufferNearlyFull": {'slipstream_buffer_bytes{namespace="a"}': "95x300",
                                   'slipstream_buffer_quota_bytes{namespace="a"}': "100x300"},
    "SlipstreamUnscoredBacklog": {'slipstream_buffer_unscored_samples{namespace="a"}': "9000x300",
                                  'slipstream_reward_scores_total{namespace="a", outcome="scored"}': "0+512x300"},
    "SlipstreamTrainerIdle": {'slipstream_trainer_wait_seconds_sum{namespace="a"}': "0+25x300",
                              'slipstream_trainer_step_seconds_sum{namespace="a"}': "0+5x300"},
    "SlipstreamStepsSkipped": {'slipstream_trainer_skipped_steps_total{namespace="a"}': "0x275 1x25"},
    "SlipstreamTrainerRestarts": {'slipstream_buffer_incarnation{namespace="a"}': "1x180 2x10 3x10 4x10 5x90"},
    "SlipstreamEnvironmentErrors": {'slipstream_environment_errors_total{namespace="a", call="step"}': "0+10x300",
                                    'slipstream_environment_call_seconds_count{namespace="a", call="step"}': "0+100x300"},
    "SlipstreamFabricRetransmits": {
        'efa_retrans_bytes{namespace="a", pod="trainer-0"}': "0+3e9x300",
        'efa_rdma_write_bytes{namespace="a", pod="trainer-0"}': "0+9e10x300",
        'efa_tx_bytes{namespace="a", pod="trainer-0"}': "0+1e9x300"},
}


def _promtool(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(programs / "promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_healthy_run_raises_nothing(programs: Path) -> None:
    done = _promtool(programs, "test", "rules", str(CHART / "tests.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    silent = {t["alertname"] for t in yaml.safe_load((CHART / "tests.yaml").read_text())["tests"][0]["alert_rule_test"]}
    assert silent == set(ALERTS)


def test_every_alert_fires(programs: Path, tmp_path: Path) -> None:
    """promtool compares labels and texts, so what an alert says is taken from what promtool says it got."""
    assert set(STORIES) == set(ALERTS)
    tests = [
        {"interval": "30s", "input_series": [{"series": s, "values": v} for s, v in story.items()],
         "alert_rule_test": [{"eval_time": "140m", "alertname": name, "exp_alerts": []}]}
        for name, story in STORIES.items()]
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({
        "rule_files": [str((CHART / "rules.yaml").resolve())], "evaluation_interval": "30s", "tests": tests}))
    done = _promtool(programs, "test", "rules", str(path))
    fired = set(re.findall(r"alertname: (\w+), time", done.stdout + done.stderr))
    assert fired == set(ALERTS), sorted(set(ALERTS) - fired)
    assert "exp:[\n" not in done.stderr or done.returncode == 1


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_every_alert_has_its_runbook(name: str) -> None:
    """The link of the alert leads to a section that says what to look at and what to do."""
    text = Path("docs/guides/runbook.md").read_text()
    assert ALERTS[name]["annotations"]["runbook_url"] == f"docs/guides/runbook.md#{name.lower()}"
    section = text.split(f"## {name}\n", 1)
    assert len(section) == 2, f"docs/guides/runbook.md lacks the section {name}"
    body = section[1].split("\n## ", 1)[0]
    assert "Look at" in body and "Do" in body and len(body) > 150
