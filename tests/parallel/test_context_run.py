"""A whole run in which two ranks share every sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import runs
from tests.parallel.families import FAMILIES
from tests.trainer_samples import CHARS

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(300)]


def test_a_run_learns_from_sequences_that_two_ranks_share(tmp_path: Path) -> None:
    """Its batches are committed, and what it computes of tokens sampled with the same weights is what the sampler computed: a
    position, mask or head out of place would show there."""
    path = runs.write_run_file(tmp_path, tmp_path, {
        "run": {"steps": 6}, "trainer": {"parallel": {"ranks": 2, "experts": 2, "context": 2, "exchange": "flat"}}})
    data = json.loads(path.read_text())
    data["model"] = {"build": {"model_type": "qwen3_moe", "tokenizer_chars": CHARS, "config": FAMILIES["qwen3_moe"]}}
    path.write_text(json.dumps(data))
    run = runs.load(path)
    process = runs.start("run", str(path), "--plain")
    try:
        output = runs.finish(process, 200)
    finally:
        process.kill()
    assert "lost 0" in output.splitlines()[-1], output
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert any(line["grad_norm"] > 0 for line in lines)
    fresh = [line["gap_fresh_max"] for line in lines if line["gap_fresh_max"] is not None]
    assert fresh and max(fresh) < 1e-4
    versions = runs.published(run)
    loaded = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in versions[6].items())
    assert any(not torch.equal(value, versions[0][name]) for name, value in versions[6].items()), "nothing was learnt"
