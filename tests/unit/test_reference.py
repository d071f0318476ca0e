"""The reference of a KL term after a restart: the weights of step 0 again, whatever was trained since."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.trainer.checkpoint import Checkpoints
from services.trainer.learner import Learner
from services.trainer.packing import trained_rows
from services.trainer.reference import start_reference
from slipstream.objects import FileStore
from tests.trainer_samples import OBJECTIVE, groups, run_file


async def in_torch(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
async def test_a_resumed_trainer_has_the_reference_of_step_0(tmp_path, lora):
    """Checkpoints of steps 0 and 1: the second start takes the weights of the latter and the reference of the former."""
    build = run_file().model.build
    assert build is not None
    run = run_file(model={"build": build.model_dump(), "lora": lora}, algorithm={"preset": "grpo", "kl": "k3+"})
    checkpoints = Checkpoints(FileStore(tmp_path), "test", 2)
    await checkpoints.open()
    await checkpoints.take_over(1)
    first, again = Learner(run), Learner(run)
    await start_reference(first, checkpoints, in_torch)
    await checkpoints.save(first.snapshot(), step=0, incarnation=1, ledger_sequence=0)
    first.step(groups(), 1)
    await checkpoints.save(first.snapshot(), step=1, incarnation=1, ledger_sequence=0)
    loaded = await checkpoints.load()
    assert loaded is not None and loaded[0].step == 1
    again.load(loaded[1])
    await start_reference(again, checkpoints, in_torch)
    rows = trained_rows(groups(seed=1), 2, OBJECTIVE)
    of_first, of_again = ([row.reference for row in learner._with_reference(rows)] for learner in (first, again))
    assert all(np.array_equal(one, other) for one, other in zip(of_first, of_again, strict=True))
    for learner in (first, again):
        learner.step(groups(seed=1), 2)
    assert [bytes(t.data) for t in first.weights()] == [bytes(t.data) for t in again.weights()]
