"""Supervised warm-up: a few steps on the environments' own answers, so that RL starts from a policy that is sometimes right.

Loss: -mean log pi(token) over the answer and the end token, AdamW with a linear ramp; nothing else. Recipe and its effect on
sort-digits: 70 steps of 64 rows at 3e-3 take a fresh half-million-parameter model to a sampled reward of about 0.25.

Consumes: `reset` of the environments (text and answer). Produces: weights and optimizer state in the learner.
Waits for: the environments. Unblocked by: their answers, or environments.step_timeout_s.

Its tasks come from streams of their own (slipstream.seeds, "warmup"), never from the run's task cursor: RL draws the same tasks
with and without a warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.trainer import supervised
from services.trainer.learner import Learner
from services.trainer.optimizer import ramp
from services.trainer.packing import Row
from slipstream import config, logs, seeds
from slipstream.auth_credentials import Credentials
from slipstream.environment import EpisodeReset, Reset, Task, connect
from slipstream.environments.client import EnvironmentClient
from slipstream.errors import ConfigError, SlipstreamError, Unavailable
from slipstream.lifecycle import Waits

# Indexes of procedural tasks from here on: no run draws that many.
FIRST_INDEX = 1 << 40

WHOSE = "an environment"

log = logs.get("trainer.warmup")


async def warm_up(
    learner: Learner, run: config.RunFile, waits: Waits, in_thread: Callable[..., Awaitable[Any]], stopping: asyncio.Event,
    credentials: Credentials | None = None,
) -> float | None:
    """All steps, or until `stopping`. Returns the last loss. Raises ConfigError when an environment gives no answer."""
    settings, loss = run.trainer.warmup, None
    async with contextlib.AsyncExitStack() as stack:
        environments = [(e, await stack.enter_async_context(connect(e, credentials=credentials))) for e in run.environments]
        for step in range(settings.steps):
            if stopping.is_set():
                return loss
            with waits.on(f"warm-up step {step + 1} of {settings.steps}: answers of the environments"):
                rows = await _rows(learner.tokenizer, run, environments, step)
            rate = settings.learning_rate * ramp(step, settings.ramp_steps)
            loss = await in_thread(learner.supervised_step, rows, rate, f"warm-up step {step + 1}")
    await in_thread(learner.start_rl, settings.keep_optimizer)
    log.info("warm-up done", steps=settings.steps, loss=round(loss or 0.0, 4))
    return loss


def row(tokenizer: Any, reset: Reset) -> Row:
    """Prompt + answer + end token as one row whose targets are the answer and the end token."""
    answer = [*supervised.encoded(tokenizer, reset.answer, WHOSE), tokenizer.eos_token_id]
    return supervised.prompt_and_answer(prompt_tokens(tokenizer, reset), answer)


def prompt_tokens(tokenizer: Any, reset: Reset) -> Sequence[int]:
    """The first observation as the rollout worker would present it: at least one token."""
    if reset.tokens is not None:
        prompt = list(reset.tokens)
    elif reset.messages is not None:
        messages = [dict(m) for m in reset.messages]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = supervised.encoded(tokenizer, chat, WHOSE)
    else:
        prompt = supervised.encoded(tokenizer, reset.text or "", WHOSE)
    if not prompt:
        raise ConfigError("an environment gave an empty prompt; nothing predicts its answer's first token")
    return prompt


async def _rows(
    tokenizer: Any, run: config.RunFile, environments: Sequence[tuple[config.Environment, EnvironmentClient]], step: int,
) -> list[Row]:
    """The rows of one step: a function of the run's seed and the step only."""
    count = run.trainer.warmup.rows
    mix = random.Random(seeds.stream(run.run.seed, "warmup/mix", step))
    chosen = mix.choices(range(len(environments)), [e.weight for e, _ in environments], k=count)
    rows: dict[int, Row] = {}
    for number, (settings, client) in enumerate(environments):
        places = [i for i in range(count) if chosen[i] == number]
        items = [EpisodeReset(f"warmup-{step}-{i}", _task(run, settings, client, step * count + i)) for i in places]
        results = await client.reset(items)
        await client.close([item.episode for item in items])
        for i, result in zip(places, results, strict=True):
            rows[i] = row(tokenizer, _checked(result, settings, run))
    return [rows[i] for i in range(count)]


def _task(run: config.RunFile, settings: config.Environment, client: EnvironmentClient, number: int) -> Task:
    seed = seeds.stream(run.run.seed, "warmup/" + settings.name, number)
    tasks = client.description.tasks
    return Task(seed % tasks if tasks else FIRST_INDEX + number, seed, settings.name)


def _checked(result: Reset | SlipstreamError, settings: config.Environment, run: config.RunFile) -> Reset:
    if isinstance(result, Unavailable):
        raise result
    if isinstance(result, SlipstreamError):
        raise ConfigError(
            f"the warm-up cannot start an episode of environment {settings.name!r} ({result.message}): mend the environment, "
            "or set trainer.warmup.steps = 0") from result
    if not result.answer:
        raise ConfigError(
            f"trainer.warmup.steps = {run.trainer.warmup.steps}: environment {settings.name!r} gives no answers to learn from; "
            "set it to 0")
    return result
