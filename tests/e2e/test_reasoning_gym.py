"""The examples of reasoning-gym through the real command: its own scorer, in the reward service, gives the rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import runs

pytest.importorskip("reasoning_gym", reason="needs pip install 'slipstream[reasoning-gym]'")

EXAMPLES = runs.ROOT / "examples" / "reasoning-gym"
STEPS = 3


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["chain-sum", "palindromes"])
def test_three_steps_of_an_example(tmp_path: Path, name: str) -> None:
    """After a short warm-up some answers are right; the reward is the dataset's score, its component says how many are solved,
    and no sample failed to be scored."""
    settings = {
        "run.folder": tmp_path / "run", "run.steps": STEPS, "trainer.warmup.steps": 60, "schedule.groups_per_batch": 16,
        "rollout.slots": 128, "reward.timeout_s": 30}
    runs.run(EXAMPLES / f"{name}.toml", *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert sum(line["reward_mean"] for line in lines) > 0
    for line in lines:
        assert line["components"]["solved"] <= line["reward_mean"] + 1e-6
        assert not line["score_failures"]
