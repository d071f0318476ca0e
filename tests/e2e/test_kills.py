"""Whatever dies, the run goes on, and in pinned mode nobody can tell from the weights that anything died."""

import json
import os
import signal
import time

import pytest
import torch

from tests.e2e import runs
from tests.e2e.plain_loop import plain_loop

STEPS, GROUPS, SIZE = 60, 4, 4
VICTIMS = ("rollout-0", "reward-0", "trainer-0", "buffer")


def wait_until(condition, timeout_s=60.0):
    """Poll a condition; fail by name."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not become true in {timeout_s} s"
        time.sleep(0.05)


def kill(run_file, instance):
    """SIGKILL a process of the run by name."""
    path = run_file.folder / "services" / f"{instance}.json"
    os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_processes_leave_no_trace_in_the_weights(tmp_path, model_dir):
    """kill -9 of a rollout worker, the reward worker, the trainer and the buffer, in turn: same weights as the plain loop."""
    folder = model_dir()
    path = runs.write_run_file(
        tmp_path,
        folder,
        {
            "run": {"steps": STEPS},
            "schedule": {"mode": "pinned", "max_lag": 1, "groups_per_batch": GROUPS, "group_size": SIZE},
            "rollout": {"workers": 2, "lease_s": 2.0, "heartbeat_s": 0.5},
            "reward": {"lease_s": 2.0},
            "trainer": {"checkpoint_every": 3},
            "buffer": {"durability": "always"},
        },
    )
    run_file = runs.load(path)

    def trained():
        log = run_file.folder / "metrics.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    process = runs.start("run", str(path), "--plain")
    try:
        for instance in VICTIMS:
            before = trained()
            wait_until(lambda before=before: trained() > before)
            kill(run_file, instance)
        output = runs.finish(process, 150)
    finally:
        process.kill()
    assert all(any(name in line and "SIGKILL" in line for line in output.splitlines()) for name in VICTIMS), output
    assert "lost 0, repeated 0" in output.splitlines()[-1], output
    expected = plain_loop(
        folder, steps=STEPS, max_lag=1, groups=GROUPS, group_size=SIZE, new_tokens=6, lr=1e-3, slots=64, context=32
    )
    versions = runs.published(run_file)
    assert max(versions) == STEPS
    for step, weights in versions.items():
        assert all(torch.equal(value, expected[step][name]) for name, value in weights.items()), f"step {step}"
