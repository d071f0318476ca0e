"""Can this model be trained at all? One forward pass tells, before a run has begun and each time that a trainer starts.

    python -m services.trainer.check --run-file PATH

Builds the model without memory, and asks whether its heads and experts can be spread over the ranks of `trainer.parallel`, and
whether prompts of in-process environments leave room for an answer. What `model.build` names is run once if it is small; a
large one, and what `model.path` names, is left to the trainer's start. Exit code 2 and one line when it cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import torch

from services.trainer.learner import Learner
from services.trainer.warmup import prompt_tokens
from slipstream import config, logs, seeds
from slipstream.environment import EpisodeReset, Reset, Task, connect
from slipstream.errors import ConfigError
from slipstream.model import from_outline, outline

SMALL = 50_000_000  # parameters that are built for a check alone
PROMPTS = 8  # of an environment, of which one has to fit

log = logs.get("trainer.check")


def positions_suffice(model: Any, run: config.RunFile) -> None:
    """Raises ConfigError when the longest answer has more tokens than the model has positions; warns when only the longest
    sample, prompt and answer, has. A model that names no limit has none.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    answer = min(run.rollout.max_new_tokens, run.rollout.context)
    if not positions or run.rollout.context <= positions:
        return
    if answer > positions:
        raise ConfigError(
            f"rollout.max_new_tokens = {run.rollout.max_new_tokens} with rollout.context = {run.rollout.context}: the model "
            f"has max_position_embeddings = {positions}, and an answer could have {answer} tokens; lower one of them to it")
    log.warning(
        f"rollout.context = {run.rollout.context} exceeds the model's max_position_embeddings = {positions}: a longer sample "
        "goes beyond what it was made for; lower it, unless all are shorter")


def ranks_can_share(model: Any, run: config.RunFile) -> None:
    """Raises ConfigError, naming the settings, when trainer.parallel cannot split this model, which may have no memory."""
    if run.trainer.parallel.ranks == 1:
        return
    from services.trainer.parallel import learner, mesh  # what one rank never needs

    mesh.fits(model, run.trainer.parallel)
    if run.model.lora:
        learner.adapts_whole(model, run.model.lora, run.trainer.parallel)


async def prompts_leave_room(tokenizer: Any, run: config.RunFile) -> None:
    """Raises ConfigError when none of the first prompts of an in-process environment can be encoded, or has room for an answer,
    and when the environment cannot be entered. One that fails to reset says nothing here: the run names its failures.
    """
    for settings in run.environments:
        if not settings.entry:
            continue
        async with connect(settings) as client:
            count = min(PROMPTS, client.description.tasks or PROMPTS)
            found = await client.reset([
                EpisodeReset(f"check-{i}", Task(i, seeds.task_seed(run.run.seed, settings.name, i), settings.name))
                for i in range(count)])
        lengths, refusals = [], []
        for reset in (r for r in found if isinstance(r, Reset)):
            try:
                lengths.append(len(prompt_tokens(tokenizer, reset)))
            except ConfigError as error:
                refusals.append(error)
        if refusals and not lengths:
            raise ConfigError(f"environments.{settings.name}: {refusals[0].message}")
        if lengths and min(lengths) >= run.rollout.context:
            raise ConfigError(
                f"environments.{settings.name}: {min(lengths)} prompt tokens leave no room in a context of "
                f"{run.rollout.context}; raise rollout.context")


def prove_forward(learner: Learner, run: config.RunFile) -> None:
    """Run the model on two tokens. Raises ConfigError when its configuration lets it be built but not be used."""
    model = learner.model
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    except Exception as error:  # whatever a model raises
        place = f"model.path = {run.model.path}" if run.model.build is None else "model.build.config"
        raise ConfigError(
            f"{place}: the model can be built, but a forward pass fails ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); correct its configuration") from error


def main(run_file: Path) -> int:
    """The command; its exit code."""
    try:
        run = config.load(run_file)
        shape, tokenizer = outline(run.model)
        with torch.device("meta"):
            empty = from_outline(shape, getattr(torch, run.model.dtype), "grouped_mm")
        ranks_can_share(empty, run)
        if run.model.build is not None:
            if run.sft is None:
                positions_suffice(empty, run)
            if sum(p.numel() for p in empty.parameters()) <= SMALL:
                prove_forward(Learner(run), run)
            if run.sft is None:
                asyncio.run(prompts_leave_room(tokenizer, run))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.trainer.check", description="Try the model of a run file.")
    parser.add_argument("--run-file", type=Path, required=True, help="run file, .json or .toml")
    sys.exit(main(parser.parse_args().run_file))
