"""Checkpoints between real processes: two ranks that shard one model, and a writer that is killed at any instant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def run(program: str, *arguments: object) -> str:
    """What a program beside this file prints."""
    done = subprocess.run(
        [sys.executable, HERE / program, *map(str, arguments)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the two ranks, and one process before and after them, saw."""
    folder = tmp_path_factory.mktemp("ranks")
    result = json.loads(run("two_ranks.py", folder))
    result["manifests"] = sorted(folder.glob("objects/checkpoints/*/manifest.json"))
    return result


def test_a_sharded_trainer_resumes_bitwise(found):
    """FSDP2 on two gloo ranks: 2 steps, checkpoint, another start, 2 steps = 4 steps; weights, moments and the generator of
    each rank. Both wrote into one checkpoint, whose name is rank 0's."""
    for rank in "01":
        assert found[rank]["step"] == 2
        assert found[rank]["resumed_at_2"] == found[rank]["at_2"] != found[rank]["undisturbed"]
        assert found[rank]["resumed"] == found[rank]["undisturbed"]
    assert found["0"]["name"] == found["1"]["name"]
    [manifest] = found["manifests"]
    files = set(json.loads(manifest.read_text())["objects"])
    assert files == {f"{part}-0000{rank}.safetensors" for part in ("weights", "optimizer", "random") for rank in (0, 1)}


def test_a_checkpoint_of_one_mesh_loads_on_another(found):
    """Two ranks wrote, one process reads, and the other way round; rows that do not divide by two included."""
    assert found["alone"] == found["0"]["full"] == found["1"]["full"]
    assert found["0"]["from_one"] == found["1"]["from_one"] == found["write_alone"]


def test_a_failure_of_one_rank_is_everybodys(found):
    """Rank 1's disk is full: both ranks get that error, there is no manifest, and the former checkpoint stays in force."""
    for rank in "01":
        assert found[rank]["broken"] == "the disk of this rank is full"
        assert found[rank]["after_broken"] == 2
    assert len(found["manifests"]) == 1


def test_killed_at_any_instant_the_last_complete_one_is_found(tmp_path):
    """SIGKILL, twelve times: what was acknowledged is there, or the one that was just being put in force; always whole."""
    rounds = [json.loads(line) for line in run("killed_writer.py", tmp_path, 12, 1).splitlines()]
    assert len(rounds) == 12
    assert all(value == step and acknowledged <= step <= acknowledged + 1 for acknowledged, step, value in rounds)
    assert len({step for _, step, _ in rounds}) == 12, "each start goes on from where the former was found"
