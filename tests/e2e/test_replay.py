"""`slipstream replay`, `fork` and `ledger` on a whole run. What a killed trainer leaves: tests/walk/test_8_replay.py."""

import json

import pytest

from tests.e2e import runs

STEPS = 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_replayed_and_forked(tmp_path, model_dir):
    """Replay reproduces what was published. A fork at step 2 trains one step more, with another learning rate; its books are
    balanced, though it has never seen its origin's draws."""
    path = runs.write_run_file(tmp_path, model_dir(), {"run": {"steps": STEPS}})
    folder = runs.load(path).folder
    runs.run(path)
    output = runs.finish(runs.start("replay", str(folder)))
    assert output.splitlines()[-1] == f"replayed {STEPS} batches, {STEPS} versions equal"

    output = runs.finish(runs.start("fork", f"{folder}@2", "branch", "--set", "trainer.learning_rate=2e-3"))
    assert "branch starts from test after step 2" in output
    branch = folder.parent / "branch"
    output = runs.run(branch / "run.toml")
    assert "lost 0, repeated 0" in output.splitlines()[-1], output
    rates = [json.loads(line)["learning_rate"] for line in (branch / "metrics.jsonl").read_text().splitlines()]
    assert rates == [1e-3] * 2 + [2e-3]
    assert "adds up     yes" in runs.finish(runs.start("ledger", str(branch)))
