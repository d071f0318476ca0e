"""Bands and alarms: what raises one, what does not, and where it is seen."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from services.trainer import alarms as alarms_module
from services.trainer.alarms import BANDS, NAMES, Alarms
from slipstream import config, telemetry
from slipstream.cli import existing_run
from slipstream.cli.metrics import Metrics
from slipstream.cli.view import Snapshot, draw, line
from tests.trainer_samples import run_file

WITHIN: dict[str, Any] = dict(
    trained_tokens=100, skipped=0, gap_fresh_mean=1e-3, gap_stale_mean=0.02, k3=1e-3, ratio_max=2.0, ess=0.99, clip_share=0.01,
    route_flip_share=None, expert_load_max=1.5, dead_expert_share=0.0, grad_norm=0.5, entropy=0.7, without_signal_share=0.2)


class Watched(Alarms):
    """Alarms whose gauges and log lines are kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
        self.registry, self.told = CollectorRegistry(), []
        gauge = telemetry.TrainerMetrics(self.registry).alarm
        tell = lambda text, **_: self.told.append(text)  # noqa: E731
        monkeypatch.setattr(alarms_module, "log", SimpleNamespace(warning=tell, info=tell))
        super().__init__(config.Alarms.model_validate(settings), lambda name, on: gauge.labels(name).set(on))
        self.step = 0

    def steps(self, *entries: dict[str, Any]) -> list[str]:
        """Names raised after each."""
        found = []
        for entry in entries:
            self.step += 1
            self.judge(WITHIN | {"step": self.step} | entry)
            found.append(",".join(self.raised))
        return found

    def gauge(self, name: str) -> float | None:
        return self.registry.get_sample_value("slipstream_alarm", {"name": name})


def test_noise_raises_nothing_and_a_change_does_once(monkeypatch):
    """Four steps outside, one inside, four outside: noise. The fifth in a row raises, with one line; it stays through single
    steps inside, and is over after five of them, with one line."""
    watched = Watched(monkeypatch)
    outside: dict[str, Any] = {"k3": 0.9}
    assert not any(watched.steps(*[outside] * 4, {}, *[outside] * 4)) and not watched.told
    assert watched.gauge("k3") == 0
    assert watched.steps(outside, outside, {}, outside) == ["k3"] * 4
    assert watched.gauge("k3") == 1 and watched.gauge("ess") == 0
    assert watched.told == ["alarm k3: estimated KL of sampler and trainer is 0.9, above 0.2 (since step 6)"]
    assert watched.steps(*[{}] * 5) == ["k3"] * 4 + [""]
    assert watched.told[1:] == ["alarm k3 is over"] and watched.gauge("k3") == 0


@pytest.mark.parametrize("band", BANDS, ids=lambda band: band.name)
def test_every_band_is_judged_and_can_be_switched_off(monkeypatch, band):
    """Beyond its setting the alarm of that name, and no other, is raised; 0 means not judged; at the limit is inside."""
    limit = getattr(config.Alarms(), band.name) or 0.01
    far = {band.figure: limit / 2 if band.least else limit * 2}
    assert Watched(monkeypatch, steps=1, **{band.name: limit}).steps(far, {band.figure: limit}) == [band.name, ""]
    assert Watched(monkeypatch, steps=1, **{band.name: 0}).steps(far) == [""]


def test_steps_without_the_figure_do_not_count(monkeypatch):
    """No token at lag 0 in a step says nothing of the numeric gap: three outside, two without, two outside make five. A step
    that trained nothing has zeros that are no figures, but its groups count."""
    watched = Watched(monkeypatch)
    far, without = {"gap_fresh_mean": 0.2}, {"gap_fresh_mean": None}
    empty = {"trained_tokens": 0, "k3": 0.0, "ess": 0.0, "without_signal_share": 1.0, "gap_fresh_mean": None}
    assert watched.steps(far, far, far, without, empty, far, far)[-2:] == ["", "numeric_gap"]
    assert Watched(monkeypatch).steps(*[empty] * 5)[-1] == "without_signal"


def test_one_skipped_step_is_enough(monkeypatch):
    """It is no noise: raised at once, over after five steps that were applied."""
    watched = Watched(monkeypatch)
    skipped = {"skipped": 1, "trained_tokens": 0}
    assert watched.steps({}, skipped, *[{}] * 5) == ["", *["nonfinite"] * 5, ""]
    assert watched.told[0].startswith("alarm nonfinite: ") and "(since step 2)" in watched.told[0]


def test_an_alarm_outlives_a_restart_without_a_second_line(monkeypatch):
    """The lines of the steps before are gone through again: same state, same sentence, the gauge is set, nothing is logged."""
    first, second = Watched(monkeypatch), Watched(monkeypatch)
    entries = [WITHIN | {"step": s, "ess": 0.1} for s in range(1, 8)]
    for entry in entries:
        first.judge(entry)
    second.told = []
    second.resume(entries)
    assert second.raised == first.raised and second.gauge("ess") == 1 and not second.told


def test_gauges_start_at_zero_for_every_name(monkeypatch):
    """An alert rule finds the series before anything went wrong."""
    assert all(Watched(monkeypatch).gauge(name) == 0 for name in NAMES)


def test_status_and_view_show_it(tmp_path: Path, capsys):
    """In the live view, in the plain line by name, in `slipstream status`, and in its JSON."""
    run = run_file(str(tmp_path))
    (tmp_path / "run.json").write_text(run.model_dump_json())
    sentence = "effective sample size, as a share, is 0.1, below 0.5 (since step 3)"
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 9, "reward_mean": 0.5, "alarms": {"ess": sentence}}) + "\n")
    metrics, out = Metrics(tmp_path / "metrics.jsonl"), io.StringIO()
    metrics.poll()
    Console(file=out, width=120).print(draw(snapshot := Snapshot("demo", 10, metrics), 120))
    assert f"alarm ess: {sentence}" in out.getvalue() and "alarms ess" in line(snapshot)
    assert existing_run.status(str(tmp_path), as_json=False) == 0
    assert f"alarm ess: {sentence}" in capsys.readouterr().out
    existing_run.status(str(tmp_path), as_json=True)
    assert json.loads(capsys.readouterr().out)["metrics"]["alarms"] == {"ess": sentence}
