"""The supervised warm-up: what it trains on, that it learns, and that it disturbs nobody's random stream."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.trainer.learner import Learner
from services.trainer.warmup import prompt_tokens, row, warm_up
from slipstream.config import RunFile
from slipstream.environment import Environment, Reset, Task
from slipstream.errors import ConfigError
from slipstream.lifecycle import SystemClock, Waits
from slipstream.model import character_tokenizer
from tests.trainer_samples import run_file


class Riddle(Environment):
    """Asks, and does not tell the answer."""

    inline = True

    def reset(self, task: Task) -> Reset:
        return Reset("1=")


async def warmed(run: RunFile) -> tuple[float, list[bytes]]:
    """(last loss, weights) after a warm-up."""
    learner = Learner(run)

    async def in_thread(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    loss = await warm_up(learner, run, Waits(SystemClock()), in_thread, asyncio.Event())
    assert learner.optimizer.param_groups[0]["lr"] == run.trainer.learning_rate
    return loss or 0.0, [bytes(t.data) for t in learner.weights()]


def settings(steps: int, **more: Any) -> RunFile:
    return run_file(trainer={"warmup": {"steps": steps, "rows": 32, "learning_rate": 1e-2, "ramp_steps": 5, **more}})


def test_targets_are_the_answer_and_the_end():
    """"31=" → "13<eos>": three targets, predicted from "=" on; the prompt is never a target."""
    tokenizer = character_tokenizer("0123456789=")
    made = row(tokenizer, Reset("31=", answer="13"))
    assert made.inputs.tolist() == tokenizer.encode("31=13")
    assert made.targets.tolist() == [*tokenizer.encode("13"), 1]
    assert made.index.tolist() == [2, 3, 4]


def test_prompts_in_their_three_forms():
    """Text and token ids as they are; an empty prompt is refused."""
    tokenizer = character_tokenizer("0123456789=")
    assert prompt_tokens(tokenizer, Reset("31=")) == tokenizer.encode("31=")
    assert prompt_tokens(tokenizer, Reset(tokens=[5, 6])) == [5, 6]
    with pytest.raises(ConfigError, match="empty prompt"):
        prompt_tokens(tokenizer, Reset(""))


async def test_the_loss_falls():
    """From log 13 at a uniform start to well below the entropy of a random digit, log 10."""
    first, _ = await warmed(settings(1))
    last, _ = await warmed(settings(60))
    assert first == pytest.approx(2.56, abs=0.1)
    assert last < 1.9


async def test_the_same_seed_gives_the_same_weights():
    """Bit for bit; dropping the optimizer's moments afterwards changes none of them."""
    (_, one), (_, two) = await warmed(settings(3)), await warmed(settings(3, keep_optimizer=False))
    assert one == two


async def test_an_environment_without_answers_is_a_configuration_error():
    """The message names the setting and the environment."""
    run = run_file(trainer={"warmup": {"steps": 3}})
    run = run.model_copy(update={"environments": (run.environments[0].model_copy(update={"entry": f"{__name__}:Riddle"}),)})
    with pytest.raises(ConfigError, match=r"warmup.steps = 3: environment 'sort' gives no answers"):
        await warmed(run)
