"""Can this model be trained at all? One forward pass tells, before a run has begun and each time that a trainer starts.

    python -m services.trainer.check --run-file PATH

Builds the model of `model.build`, without memory, and runs it once if it is small; a large one, and what `model.path` names, is
left to the trainer's start. Exit code 2 and one line when it cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from services.trainer.learner import Learner
from slipstream import config, logs
from slipstream.errors import ConfigError
from slipstream.model import build

SMALL = 50_000_000  # parameters that are built for a check alone

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
        if run.model.build is not None:
            with torch.device("meta"):
                empty, _ = build(run.model, run.run.seed, run.deterministic)
            if run.sft is None:
                positions_suffice(empty, run)
            if sum(p.numel() for p in empty.parameters()) <= SMALL:
                prove_forward(Learner(run), run)
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m services.trainer.check", description="Try the model of a run file.")
    parser.add_argument("--run-file", type=Path, required=True, help="run file, .json or .toml")
    sys.exit(main(parser.parse_args().run_file))
