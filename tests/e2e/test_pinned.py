"""The pinned schedule is a plain loop: five processes, any number of workers, the same weights bit for bit."""

import pytest
import torch

from tests.e2e import runs
from tests.e2e.plain_loop import plain_loop

STEPS, GROUPS, SIZE = 4, 4, 4


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "workers"), [(0, 1), (0, 2), (1, 1), (1, 2)])
def test_weights_equal_a_plain_loop_bit_for_bit(tmp_path, model_dir, max_lag, workers):
    """Every published version, from the first to the last, equals the weights that one process gets by itself."""
    folder = model_dir()
    path = runs.write_run_file(
        tmp_path,
        folder,
        {
            "run": {"steps": STEPS},
            "schedule": {"mode": "pinned", "max_lag": max_lag, "groups_per_batch": GROUPS, "group_size": SIZE},
            "rollout": {"workers": workers},
        },
    )
    output = runs.run(path)
    assert "lost 0, repeated 0" in output.splitlines()[-1]
    expected = plain_loop(
        folder, steps=STEPS, max_lag=max_lag, groups=GROUPS, group_size=SIZE, new_tokens=6, lr=1e-3, slots=64, context=32
    )
    versions = runs.published(runs.load(path))
    assert sorted(versions) == list(range(STEPS + 1))
    for step, weights in enumerate(expected):
        for name, value in versions[step].items():
            assert torch.equal(value, weights[name]), f"step {step}, {name}"
    assert not torch.equal(expected[1]["lm_head.weight"], expected[0]["lm_head.weight"]), "something was learned at all"
    lags = {line["lag_max"] for line in runs.metrics(runs.load(path))}
    assert lags == ({0} if max_lag == 0 else {0, 1})
