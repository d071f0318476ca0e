"""One machine whose devices trainer and rollout workers share: a real run, and a real run whose holders are killed."""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import time
from datetime import datetime

import pytest

from tests.e2e import runs

SHARED = {"placement": "shared"}


def turns(run_file, instance):
    """(taken, given) of a process's log, unix seconds; a turn that was cut short by a death ends with infinity."""
    found, taken = [], None
    for line in (run_file.folder / "logs" / f"{instance}.log").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            at = datetime.fromisoformat(record["time"]).timestamp()
            if record["message"] == "devices taken":
                found, taken = found + ([(taken, float("inf"))] if taken is not None else []), at
            elif record["message"] == "devices given back" and taken is not None:
                found, taken = [*found, (taken, at)], None
    return found if taken is None else [*found, (taken, float("inf"))]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_run_on_shared_devices_takes_turns_and_learns_the_same(tmp_path, model_dir):
    """Pinned, so that weights tell: those of the same run on split devices, bit for bit. The turns never overlap."""
    folder, found = model_dir(), {}
    for placement in ("split", "shared"):
        place = tmp_path / placement
        place.mkdir()
        path = runs.write_run_file(place, folder, {
            "run": {"steps": 6, "placement": placement}, "schedule": {"mode": "pinned", "max_lag": 1}})
        output = runs.run(path)
        assert "lost 0, repeated 0" in output.splitlines()[-1], output
        found[placement] = runs.load(path)
    split, shared = (runs.published(run_file) for run_file in found.values())
    assert max(shared) == 6 and shared.keys() == split.keys()
    for step, weights in shared.items():
        assert all(bool((value == split[step][name]).all()) for name, value in weights.items()), f"step {step}"
    trainer, worker = turns(found["shared"], "trainer-0"), turns(found["shared"], "rollout-0")
    assert len(trainer) >= 4 and len(worker) >= 3
    both = sorted([*trainer, *worker])
    assert all(a[1] <= b[0] + 0.002 for a, b in itertools.pairwise(both)), both  # logs tell milliseconds
    assert not turns(found["split"], "trainer-0")


def holder(run_file, instance):
    """The process of that name, if it has the devices now."""
    path = run_file.folder / "services" / f"{instance}.json"
    with contextlib.suppress(OSError, json.JSONDecodeError, KeyError):
        pid = json.loads(path.read_text())["pid"]
        turn = turns(run_file, instance)
        return pid if turn and turn[-1][1] == float("inf") else None
    return None


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_whoever_has_the_devices_may_die(tmp_path, model_dir):
    """kill -9 of the trainer in its turn and of a worker in its own, twice each: the other goes on, and nothing is lost."""
    path = runs.write_run_file(tmp_path, model_dir(), {
        "run": {"steps": 40} | SHARED, "rollout": {"lease_s": 2.0, "heartbeat_s": 0.5}, "reward": {"lease_s": 2.0},
        "buffer": {"durability": "always"}})
    run_file = runs.load(path)
    process = runs.start("run", str(path), "--plain")

    def trained():
        log = run_file.folder / "metrics.jsonl"
        return len(log.read_text().splitlines()) if log.exists() else 0

    try:
        for instance in ("trainer-0", "rollout-0") * 2:
            before, deadline = trained(), time.monotonic() + 60
            while trained() < before + 2 or (pid := holder(run_file, instance)) is None:
                assert time.monotonic() < deadline and process.poll() is None, instance
                time.sleep(0.005)
            os.kill(pid, signal.SIGKILL)
        output = runs.finish(process, 150)
    finally:
        process.kill()
    assert output.count("SIGKILL") >= 4 and "lost 0, repeated 0" in output.splitlines()[-1], output
    with (run_file.folder / "devices.held").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has them any more
