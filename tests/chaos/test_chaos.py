"""`benchmarks.chaos` itself: what makes its exit code 0, and that something really lost or really repeated does not."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.chaos import Outcome, report
from benchmarks.faults.auditor import Judgement
from benchmarks.faults.edges import counted
from benchmarks.faults.injector import Injector
from benchmarks.faults.remains import Remains
from benchmarks.faults.schedule import LINK_FAULTS, PROCESSES
from benchmarks.faults.victims import Run

ROOT = Path(__file__).resolve().parents[2]
CLEAN = Judgement(batches=600, trained=9000, acknowledged=9100, dropped=100, incarnations=40, resumed=80)
LAST = re.compile(r"kills (\d+), lost (\d+), repeated (\d+), weights (.+), bytes (\d+), open leases (\d+)")


def chaos(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and figures of a chaos run."""
    figures = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--folder", str(folder / "chaos"), "--json", str(figures), *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=220)
    return done.returncode, done.stdout, json.loads(figures.read_text()) if figures.exists() else {}


def verdict(capsys: pytest.CaptureFixture[str], minutes: float = 10, **defects: Any) -> tuple[int, str]:
    """Exit code and last line of a run that was good in everything but the `defects`."""
    judgement = dataclasses.replace(CLEAN, **{k: v for k, v in defects.items() if k in ("lost", "repeated", "batches")})
    if judgement.lost or judgement.repeated:
        judgement.complaints = ["something was"]
    left = Remains(defects.get("bytes", 0), 0, 1, [], "")
    edges = dict.fromkeys(counted({}), 3) | defects.get("edges", {})
    outcome = Outcome(judgement, left, defects.get("complaints", []), "equal (pinned)", edges)
    injector: Any = Injector(cast(Run, None), {}, 1, print)
    for process in PROCESSES:
        injector.counts["kill", process] = defects.get("kills", 15)
        injector.counts["stop", process] = defects.get("stops", 15)
    for fault in LINK_FAULTS:
        injector.counts[fault, "redis"] = defects.get("link_faults", 15)
    arguments = argparse.Namespace(schedule="free", minutes=minutes, seed=1, json="")
    return report(arguments, outcome, injector, 600.0), capsys.readouterr().out.splitlines()[-1]


def test_a_clean_run_that_was_disturbed_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0, and the last line says everything."""
    assert verdict(capsys) == (0, "kills 90, lost 0, repeated 0, weights equal (pinned), bytes 0, open leases 0")


@pytest.mark.parametrize("defects", [
    {"lost": 1}, {"repeated": 1}, {"complaints": ["left over: 7 bytes, 0 leases, 0 draws"]}, {"kills": 14}, {"stops": 14},
    {"link_faults": 14}, {"batches": 59},
    {"edges": {("sample", "scoring", "unscored"): 2}}], ids=str)
def test_whatever_is_wrong_turns_the_exit_code(capsys: pytest.CaptureFixture[str], defects: dict[str, Any]) -> None:
    """Something lost, repeated or left over; or too few faults, batches or passages over an edge that faults can reach."""
    assert verdict(capsys, **defects)[0] == 1


def test_less_time_asks_for_less_and_exempt_edges_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Two minutes: 3 kills of each, 12 batches, no passages. An edge that is exempt may have none in ten minutes either."""
    assert verdict(capsys, minutes=2, kills=3, batches=12, edges={("sample", "scoring", "unscored"): 0})[0] == 0
    assert verdict(capsys, minutes=2, kills=2)[0] == 1
    assert verdict(capsys, edges={("sample", "leased", "partial"): 0})[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("plant", "sentence"), [
    ("loss", r"chaos: sample \d of draw 3\d was acknowledged, but neither trained nor dropped by name"),
    ("repeat", r"chaos: batch 10 by incarnation \d was trained into weights that contained it already")])
def test_a_planted_fault_turns_the_exit_code(tmp_path: Path, plant: str, sentence: str) -> None:
    """The buffer forgets an acknowledged sample; the trainer trains a batch twice. That is told by name, and nothing else."""
    code, output, figures = chaos(tmp_path, "--minutes", "0.01", "--steps", "11", "--workers", "1", "--plant", plant)
    assert code == 1 and LAST.fullmatch(output.splitlines()[-1]), output
    assert (figures["lost"] > 0, figures["repeated"] > 0) == (plant == "loss", plant == "repeat"), output
    assert len(re.findall(sentence, output)) == 1, output
    if plant == "repeat":  # the run's own audit sees that, too
        assert re.search(r"the run ended with 1: .* lost 0, repeated \d+", output), output
    assert figures["complaints"] == (2 if plant == "repeat" else 1), output
