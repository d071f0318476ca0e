"""Other families of experts, from a directory to a trained model, through the real command: no code knows their names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import runs

STEPS = 5
# None when a batch has no such tokens, or no routes, or trains nothing
NULLABLE = (
    "gap_fresh_mean", "gap_fresh_max", "gap_stale_mean", "gap_stale_max", "route_flip_share", "route_gap", "route_gap_live",
    "expert_load_max", "expert_load_mean", "dead_experts", "dead_expert_share")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_five_steps_end_to_end(tmp_path: Path, model_dir: Callable[[str], Path], family: str) -> None:
    """Five finite lines of metrics; sampler and trainer agree on the policy; what is left behind is an ordinary Hugging Face
    model of the same family with the weights of the last version, and not those it began with."""
    folder = model_dir(family)
    path = runs.write_run_file(tmp_path, folder, {"run": {"steps": STEPS}})
    runs.run(path)
    run = runs.load(path)
    lines = runs.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        numbers = {name: value for name, value in line.items() if not isinstance(value, dict) and name not in NULLABLE}
        assert all(math.isfinite(value) for value in numbers.values()), line
    assert lines[0]["lag_max"] == 0 and lines[0]["trained_tokens"] > 0
    assert max(lines[0]["gap_mean"], lines[0]["gap_fresh_max"]) < 1e-4
    assert max(line["lag_max"] for line in lines) <= 1

    exported = run.folder / "model"
    assert json.loads((exported / "config.json").read_text())["model_type"] == family
    first, last = weights(folder), weights(exported)
    assert first.keys() == last.keys()
    assert not any(torch.equal(first[name], last[name]) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    version = runs.published(run)[STEPS]
    assert version.keys() == last.keys() and all(torch.equal(version[name], last[name]) for name in last)


def weights(folder: Path) -> dict[str, Any]:
    """As transformers loads them."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
