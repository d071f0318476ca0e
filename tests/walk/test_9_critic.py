"""After the walk, with a critic: what a checkpoint and the batch log hold is enough for it, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from slipstream.config import RunFile
from slipstream.objects import FileStore
from tests.rollout_runs import run_file
from tests.walk.hops import Walk
from tests.walk.test_8_replay import Disturbed


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    """The stage of the walk, with PPO."""
    return run_file(
        tmp_path_factory.mktemp("critic"), environment={"name": "sort-digits", "args": {"shortest": 2, "longest": 2}},
        schedule={"groups_per_batch": 4, "group_size": 4, "max_lag": 1}, rollout={"max_new_tokens": 3},
        trainer={"learning_rate": 1e-3}, algorithm={"preset": "ppo"}, critic={"learning_rate": 1e-2, "updates": 2})


async def test_a_run_with_a_critic_is_replayed(walk: Walk, tmp_path: Path) -> None:
    """Two trainers, the second from checkpoint 0, in which the critic lies beside the policy: it trains the first's steps again
    to the same weights. Replay from that checkpoint reproduces all five versions, so also every value of the critic."""
    disturbed = await Disturbed(walk, tmp_path).play()
    report = await disturbed.again()
    assert report.sentence == "replayed 3 batches, 5 versions equal"
    checkpoints = Checkpoints(FileStore(tmp_path / "objects"), "test", keep=1)
    await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None and loaded[0].step == 2
    assert {key.rpartition("/")[2].partition("-")[0] for key in await disturbed.store.list("checkpoints/00000002")} == {
        "weights", "optimizer", "random", "critic", "critic_optimizer", "manifest.json"}
    assert "head.weight" in loaded[1].critic and loaded[1].critic["head.weight"].abs().max() > 0
    learner = Learner(disturbed.run)
    learner.load(loaded[1])
    assert learner.critic is not None
    assert learner.critic.optimizer.state[learner.critic.model.head.weight]["step"] == 4, "two updates in each of two steps"
