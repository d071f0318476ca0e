"""Can this model be trained at all? One forward pass tells, before a run has begun and each time that a trainer starts.

    python -m services.trainer.check --run-file PATH

Builds the model of `model.build`, without memory, and runs it once if it is small; a large one, and what `model.path` names, is
left to the trainer's start. Exit code 2 and one line when it cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from services.trainer.learner import Learner
from slipstream import config
from slipstream.errors import ConfigError
from slipstream.model import build

SMALL = 50_000_000  # parameters that are built for a check alone


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
