"""What of a batch is made while the one before trains changes nothing but the time of its step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.trainer.learner import Learner
from slipstream.errors import InvalidInput
from tests.trainer_samples import groups, run_file

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "credit by turn": {"algorithm": {"credit": "turn"}},
    "masked": {"algorithm": {"mask_truncated": True}},
    "mini-steps": {"trainer": {"minibatches": 2}},
    "a divergence in the loss": {"algorithm": {"kl": "k2", "kl_coefficient": 0.1}},
}


def made(sections: dict[str, Any]) -> Learner:
    learner = Learner(run_file(**sections))
    if sections.get("algorithm", {}).get("kl"):
        learner.start_reference()
    return learner


@pytest.mark.parametrize("case", CASES)
def test_a_prepared_batch_trains_as_any_other(case: str) -> None:
    """Bit for bit, metrics and weights, over two steps of which the second has another batch."""
    plain, ahead = made(CASES[case]), made(CASES[case])
    for step in (1, 2):
        batch = groups(5, seed=step, rewards=(0, 1, 0.5, 1))
        rows = ahead.prepared(batch, step)
        assert rows, case
        assert ahead.step(batch, step, rows) == plain.step(batch, step)
    for one, other in zip(plain.weights(), ahead.weights(), strict=True):
        assert bytes(one.data) == bytes(other.data), one.name


@pytest.mark.parametrize("algorithm", [
    {"kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1}, {"preset": "ppo", "advantage": "gae"}])
def test_what_asks_another_model_first_is_not_prepared(algorithm: dict[str, Any]) -> None:
    assert Learner(run_file(algorithm=algorithm)).prepared(groups(), 1) is None


@pytest.mark.parametrize("wrong", ["a token of another model", "a log-probability too few"])
def test_the_step_says_what_is_wrong(wrong: str) -> None:
    """A prefetched batch fails where it is trained, in the words for it, and nothing is applied."""
    learner, batch = Learner(run_file()), groups()
    before = [bytes(tensor.data) for tensor in learner.weights()]
    segment = batch[1].members[1].sample.segments[0]
    if wrong == "a token of another model":
        segment.tokens = np.full_like(segment.tokens, 9999)
    else:
        segment.logprobs = segment.logprobs[1:]
    assert learner.prepared(batch, 1) is None
    with pytest.raises(InvalidInput):
        learner.step(batch, 1, None)
    assert [bytes(tensor.data) for tensor in learner.weights()] == before
