"""The fabric benchmark, small: bytes over the slow links are those of the formulas, and every figure is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fabric_links import missing

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.skipif(bool(missing()), reason=f"nothing was measured: {missing()}")
def test_bytes_over_slow_links_are_those_of_the_formulas(tmp_path: Path) -> None:
    """Counted by the node's device, headers and all: within 2 %. Times are shown and not judged."""
    file = tmp_path / "fabric.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fabric", "--tokens", "128", "--hidden", "512", "--layers", "1", "--repetitions", "1",
         "--json", str(file)], capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert found["bytes_vs_formula"] == pytest.approx(1, abs=0.02)
    assert found["bytes_flat_copy_over_hier"] == pytest.approx(4, abs=0.15)
    assert {"time_copy_over_hier", "time_dedup_over_hier", "step_gain", "step_gain_overlapped", "compute_share"} <= found.keys()
    assert "No claim about GPUs" in done.stdout and "decode-shaped" in done.stdout
