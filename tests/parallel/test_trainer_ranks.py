"""A whole run whose trainer is two processes, and what a rank that dies or freezes costs it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.config import RunFile
from tests.e2e import runs
from tests.parallel.families import FAMILIES
from tests.trainer_samples import CHARS

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


def write(folder: Path, steps: int, ranks: int = 2) -> Path:
    """Ranks with the experts on all of them; a collective gives up after six seconds."""
    exchange = "flat" if ranks > 1 else "auto"
    path = runs.write_run_file(folder, folder, {
        "run": {"steps": steps},
        "trainer": {
            "learning_rate": 1e-3, "checkpoint_every": 2,
            "parallel": {"ranks": ranks, "experts": ranks, "exchange": exchange, "collective_timeout_s": 6}}})
    data: dict[str, Any] = json.loads(path.read_text())
    data["model"] = {"build": {"model_type": "qwen3_moe", "tokenizer_chars": CHARS, "config": FAMILIES["qwen3_moe"]}}
    path.write_text(json.dumps(data))
    return path


def follower(path: Path) -> int | None:
    """Process id of rank 1."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(path.parent).encode() in (entry / "cmdline").read_bytes() and (
                    b"\0RANK=1\0" in (entry / "environ").read_bytes()):
                return int(entry.name)
        except OSError:
            continue  # it has gone meanwhile
    return None


def wait_until(condition: Callable[[], Any], timeout_s: float = 200) -> Any:
    """Its first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout_s} s"
        time.sleep(0.1)
    return value


def trained(run: RunFile) -> int:
    log = run.folder / "metrics.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_run_goes_on_after_a_rank_is_lost(tmp_path: Path, how: str) -> None:
    """Killed: the others notice at once. Frozen: when the collective's time is over, with the stacks in the log. Either way the
    trainer starts again and resumes, and the ledger balances."""
    path = write(tmp_path, 24)
    run = runs.load(path)
    process = runs.start("run", str(path), "--plain")
    try:
        wait_until(lambda: trained(run) >= 4)
        victim = wait_until(lambda: follower(path))
        os.kill(victim, signal.Signals[how])
        output = runs.finish(process, 300)
    finally:
        process.kill()
    assert "lost 0" in output.splitlines()[-1], output
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, 25))
    assert {line["incarnation"] for line in runs.metrics(run)} >= {1, 2}, "it was not restarted"
    log = (run.folder / "logs" / "trainer-0.log").read_text()
    if how == "SIGSTOP":
        assert "most recent call first" in log and "conductor.py" in log, "no stacks were written"
    version = runs.published(run)[24]
    loaded = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in version.items())
    assert all(line["gap_fresh_max"] is None or line["gap_fresh_max"] < 1e-4 for line in runs.metrics(run))


def logged(run: RunFile) -> dict[str, bytes]:
    """The batch log: composition and bodies of every batch."""
    return {path.name: path.read_bytes() for path in (run.folder / "objects" / "batches").iterdir()}


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks, then one process, then two again. Each goes on from the other's last checkpoint, with the weights that are in
    it; batches that were numbered keep their composition, and no step is lost or repeated."""
    before: dict[str, bytes] = {}
    for ranks, until in ((2, 4), (1, 8), (2, 12)):
        path = write(tmp_path, 12, ranks)
        run = runs.load(path)
        process = runs.start("run", str(path), "--plain")
        try:
            wait_until(lambda run=run, until=until: trained(run) >= until)
            if until < 12:
                process.send_signal(signal.SIGINT)
            output = runs.finish(process, 300)
        finally:
            process.kill()
        now = logged(run)
        assert {name: now[name] for name in before} == before
        before = now
    assert "lost 0, repeated 0" in output.splitlines()[-1], output
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, 13))
    assert {line["incarnation"] for line in runs.metrics(run)} == {1, 2, 3}
    headers = [json.loads(path.read_text()) for path in (run.folder / "objects" / "checkpoints").glob("*/manifest.json")]
    headers.sort(key=lambda header: header["step"])
    assert headers[0]["ranks"] == headers[-1]["ranks"] == 2, "of the first, which is kept, and the last"
    loaded = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in runs.published(run)[12].items())
    assert all(line["gap_fresh_max"] is None or line["gap_fresh_max"] < 1e-4 for line in runs.metrics(run))
