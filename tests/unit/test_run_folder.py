"""The run folder: whose it is, and what a start makes of what lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream import config
from slipstream.cli import dry_run, run_folder, run_start
from slipstream.cli.run_folder import RunFolder, RunLock
from slipstream.cli.run_start import Start
from slipstream.errors import ConfigError, NotFound


def a_run(folder: Path, model: str = "x", **settings: Any) -> config.RunFile:
    return config.parse({"run": {"name": "parts", "folder": str(folder), **settings}, "model": {"build": {"model_type": model}},
                         "environments": [{"name": "e", "entry": "slipstream.environments.sort_digits:SortDigits"}]})


def started(run: config.RunFile) -> RunFolder:
    """The folder as a start leaves it before anything is published."""
    folder, lock = run_folder.lock(run)
    run_start.lay_out(folder, run, fresh=False)
    run_folder.write_run_file(folder, run, "127.0.0.1:1")
    lock.release()
    return folder


def published(folder: RunFolder) -> None:
    folder.published.write_text('{"version": 1}\n')


def test_leftovers_of_a_dead_run_hold_the_lock(tmp_path: Path) -> None:
    """The lock outlives its supervisor in the processes it started; a new run names them instead of joining them."""
    folder = RunFolder(tmp_path)
    lock = RunLock.take(folder)
    left = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    os.pwrite(lock.fd, f"{dead.pid}\n".ljust(20).encode(), 0)
    lock.release()
    run_folder.write_json(folder.state, {"processes": {"rollout-0": {"pid": left.pid}}})
    assert run_folder.held(folder)
    with pytest.raises(ConfigError, match=f"kill {left.pid}"):
        RunLock.take(folder, leftover_wait_s=0.05)
    left.communicate()
    RunLock.take(folder).release()
    assert not run_folder.held(folder)


def test_fresh_empties_and_keeps_out_of_foreign_places(tmp_path: Path) -> None:
    """--fresh deletes what the run wrote into its folder; objects elsewhere it refuses to touch."""
    run = a_run(tmp_path / "run")
    folder, lock = run_folder.lock(run)
    run_start.lay_out(folder, run, fresh=False)
    run_folder.write_run_file(folder, run, "127.0.0.1:1")
    (folder.path / "metrics.jsonl").touch()
    assert folder.secret.stat().st_mode & 0o777 == 0o600
    run_start.lay_out(folder, run, fresh=True)
    assert sorted(p.name for p in folder.path.iterdir()) == [
            "audit", "lock", "logs", "redis", "release.json", "secret", "services"]
    elsewhere = run.model_copy(update={"objects": config.Objects(url="s3://bucket/prefix")})
    with pytest.raises(ConfigError, match="objects.url"):
        run_start.lay_out(folder, elsewhere, fresh=True)
    lock.release()


def test_resolved_run_file_is_the_same_run(tmp_path: Path) -> None:
    """What processes read has the buffer's address and the hash of what the user wrote; another hash is refused."""
    run = a_run(tmp_path / "run")
    folder, lock = run_folder.lock(run)
    run_start.lay_out(folder, run, fresh=False)
    resolved = run_folder.write_run_file(folder, run, "127.0.0.1:5")
    assert config.load(folder.run_file) == resolved and resolved.hash == run.hash
    assert resolved.service.buffer_address == "127.0.0.1:5"
    run_start.lay_out(folder, run, fresh=False)
    published(folder)
    with pytest.raises(ConfigError, match=r"run.seed was 0 and is 3.*--fresh"):
        run_start.lay_out(folder, a_run(tmp_path / "run", seed=3), fresh=False)
    lock.release()


def test_a_run_that_came_to_nothing_claims_no_folder(tmp_path: Path) -> None:
    """A start that is refused late leaves a run file; with the mistake corrected the same folder is taken, emptied."""
    folder = started(a_run(tmp_path / "run", model="wrong"))
    (folder.redis / "appendonly.aof").write_text("draws of the other run")
    right = a_run(tmp_path / "run")
    assert run_start.start(folder, right, fresh=False) is Start.OVER
    run_start.lay_out(folder, right, fresh=False)
    assert not folder.run_file.exists() and not list(folder.redis.iterdir())
    run_folder.write_run_file(folder, right, "127.0.0.1:1")
    assert run_start.start(folder, right, fresh=False) is Start.RESUME
    run_folder.write_json(folder.state, {"processes": {"trainer": {"service": "trainer", "state": "finished"}}})
    assert run_start.start(folder, right, fresh=False) is Start.FINISHED
    assert run_start.start(folder, a_run(tmp_path / "run", steps=9), fresh=False) is Start.RESUME
    published(folder)
    with pytest.raises(ConfigError, match=r'model_type was "x" and is "wrong"'):
        run_start.start(folder, a_run(tmp_path / "run", model="wrong"), fresh=False)


def test_a_fork_keeps_what_its_checkpoint_needs(tmp_path: Path) -> None:
    """Edited before its first start, a fork's run file may change much but not the model; what the fork made is kept."""
    folder, run = RunFolder(tmp_path / "fork"), a_run(tmp_path / "fork")
    (folder.path / "objects").mkdir(parents=True)
    for name in ("run.toml", "objects/checkpoint", "metrics.jsonl"):
        (folder.path / name).write_text("of the origin")
    run_folder.write_json(folder.fork, {"settings": run.model_dump(mode="json"), "step": 3})
    with pytest.raises(NotFound, match=r"a fork that has not been started: `slipstream run .*fork/run.toml`"):
        run_folder.find(str(folder.path))
    with pytest.raises(ConfigError, match=r'model.build.model_type = "y": fork is a fork and keeps its origin\'s "x"'):
        run_start.start(folder, a_run(folder.path, model="y"), fresh=False)
    assert run_start.start(folder, a_run(folder.path, seed=3), fresh=False) is Start.FORK
    started(a_run(folder.path, seed=3))
    assert run_start.start(folder, a_run(folder.path, seed=4), fresh=False) is Start.FORK
    started(a_run(folder.path, seed=4))
    assert (folder.path / "objects" / "checkpoint").read_text() == (folder.path / "run.toml").read_text() == "of the origin"
    with pytest.raises(ConfigError, match="make it again with `slipstream fork`"):
        run_start.start(folder, a_run(folder.path, seed=4), fresh=True)


def test_dry_run_looks_at_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last line says what a start would do; a run with other settings there, or a live one, speaks against it."""
    async def nothing(_: config.RunFile) -> list[str]:
        return []

    monkeypatch.setattr("slipstream.cli.preflight.problems", nothing)
    run = a_run(tmp_path / "run")
    assert dry_run.run(run, fresh=False) == 0 and not run.folder.exists()
    assert capsys.readouterr().out.endswith(f"# nothing speaks against a start: a new run, in {tmp_path}/run\n")
    published(started(run))
    assert dry_run.run(run, fresh=False) == 0
    assert "nothing speaks against a start: the run there goes on" in capsys.readouterr().out
    assert dry_run.run(a_run(tmp_path / "run", seed=3), fresh=False) == 2
    out, err = capsys.readouterr()
    assert "run.seed was 0 and is 3" in err
    assert out == "# one thing speaks against a start\n", "the settings would bury it"
    assert dry_run.run(a_run(tmp_path / "run", seed=3), fresh=True) == 0
    assert "a new run, after what is there is deleted" in capsys.readouterr().out
    _, lock = run_folder.lock(run)
    assert dry_run.run(run, fresh=False) == 2 and "locked by a live run" in capsys.readouterr().err
    lock.release()
