"""The parts of the command line by themselves: audit, metrics, view, restart policy, TOML, Redis settings."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream import config
from slipstream.cli import embedded_redis, toml_text
from slipstream.cli.audit import Audit, Balance, audit
from slipstream.cli.existing_run import status
from slipstream.cli.metrics import Metrics, sparkline
from slipstream.cli.processes import Command, Death, Limits, Process, last_words
from slipstream.cli.run import report
from slipstream.cli.run_folder import RunFolder, write_json, write_run_file
from slipstream.cli.supervisor import Ending
from slipstream.cli.survey import ServiceStatus
from slipstream.cli.view import Snapshot, draw, duration, line, waits_line


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def a_run(folder: Path, **settings: Any) -> config.RunFile:
    return config.parse({"run": {"name": "parts", "folder": str(folder), **settings}, "model": {"build": {"model_type": "x"}},
                         "environments": [{"name": "e", "entry": "slipstream.environments.sort_digits:SortDigits"}]})


# -- audit --------------------------------------------------------------------------------------------------------------


def batch(k: int, draws: list[int], incarnation: int = 1, crc: int = 7) -> dict[str, Any]:
    """An audit line: two samples a draw."""
    return {"batch": k, "incarnation": incarnation, "samples": [[d, i, crc + d * 10 + i, 1] for d in draws for i in (0, 1)]}


def test_audit_of_an_undisturbed_run(tmp_path: Path) -> None:
    """5 draws: 4 trained in 2 batches, 1 dropped by name."""
    trained = write_lines(tmp_path / "t.jsonl", [batch(1, [0, 1]), batch(2, [2, 4])])
    found = audit(trained, Balance(made=5, dropped=1, open=0, numbered_batch=2, groups_per_batch=2))
    assert found == Audit(steps=2, samples=8, draws=4, repeated=0, lost=0) and found.clean
    assert found.sentence == "lost 0, repeated 0"


def test_a_step_trained_again_after_a_restart_is_no_repeat(tmp_path: Path) -> None:
    """The weights went back to the checkpoint: batch 2 with the same members counts once. A torn line is no line."""
    trained = write_lines(tmp_path / "t.jsonl", [batch(1, [0, 1]), batch(2, [2, 3])])
    with trained.open("a") as file:
        file.write('{"batch": 3, "incarnation": 1, "sam' + json.dumps(batch(2, [2, 3], incarnation=2)) + "\n")
    assert audit(trained, Balance(4, 0, 0, 2, 2)) == Audit(2, 8, 4, 0, 0)


def test_audit_finds_repeats(tmp_path: Path) -> None:
    """A draw in two batches, and a batch whose members changed between incarnations."""
    twice = write_lines(tmp_path / "t.jsonl", [batch(1, [0, 1]), batch(2, [1, 2])])
    assert audit(twice, None).repeated == 2
    changed = write_lines(tmp_path / "c.jsonl", [batch(1, [0]), batch(1, [0], incarnation=2, crc=8)])
    assert audit(changed, None).repeated > 0


def test_audit_finds_losses(tmp_path: Path) -> None:
    """Draws that nobody accounts for; those open or in a numbered batch at the end are accounted for."""
    trained = write_lines(tmp_path / "t.jsonl", [batch(1, [0, 1])])
    assert audit(trained, Balance(made=8, dropped=1, open=3, numbered_batch=2, groups_per_batch=2)).lost == 0
    assert audit(trained, Balance(made=9, dropped=1, open=3, numbered_batch=2, groups_per_batch=2)).lost == 1
    assert audit(trained, Balance(made=3, dropped=0, open=3, numbered_batch=0, groups_per_batch=2)).lost == 0  # an older look
    assert audit(trained, None).sentence == "lost unknown, repeated 0"
    assert not audit(trained, None).clean


# -- metrics and view ---------------------------------------------------------------------------------------------------


def test_metrics_follow_the_file(tmp_path: Path) -> None:
    """Lines are read as they come, half lines later, and a file that a restarted trainer has cut is read anew."""
    path = write_lines(tmp_path / "m.jsonl", [{"step": 1, "reward_mean": 0.2}, {"step": 2, "reward_mean": 0.4}])
    metrics = Metrics(path)
    assert metrics.poll() == [1, 2] and metrics.poll() == []
    with path.open("a") as file:
        file.write('{"step": 3, "rew')
        file.flush()
        assert metrics.poll() == []
        file.write('ard_mean": 0.6}\n')
    assert metrics.poll() == [3] and metrics.rewards == [0.2, 0.4, 0.6] and metrics.step == 3
    assert metrics.first_and_last_reward == pytest.approx((0.4, 0.4))
    cut = write_lines(tmp_path / "cut", [{"step": 1, "reward_mean": 0.2}])
    cut.replace(path)
    assert metrics.poll() == [1] and metrics.step == 1


def test_rows_of_a_new_incarnation_replace_later_steps(tmp_path: Path) -> None:
    """A trainer that went back to step 2 voids the rows after it."""
    path = write_lines(tmp_path / "m.jsonl", [{"step": s, "reward_mean": s / 10, "incarnation": 1} for s in (1, 2, 3, 4)])
    metrics = Metrics(path)
    metrics.poll()
    with path.open("a") as file:
        file.write(json.dumps({"step": 3, "reward_mean": 0.9, "incarnation": 2}) + "\n")
    metrics.poll()
    assert metrics.rewards == [0.1, 0.2, 0.9]


def test_sparkline() -> None:
    """One block per bucket, from lowest to highest."""
    assert sparkline([0, 1, 2, 3], 4) == "▁▃▆█"
    assert sparkline([1, 1, 5, 5], 2) == "▁█"
    assert sparkline([0.5], 9) == "▁" and sparkline([], 9) == ""


def a_snapshot(tmp_path: Path) -> Snapshot:
    rows = [{"step": s, "reward_mean": 0.3 + s / 200, "tokens_per_s": 45678, "lag_mean": 0.9, "lag_max": 1, "gap_mean": 2e-3,
             "gap_max": 3e-2, "loss": 0.01, "grad_norm": 1.5, "entropy": 0.4, "clip_share": 0.02, "step_s": 0.1, "wait_s": 0.1,
             "time_unix": 1000 + s / 4} for s in range(1, 41)]
    metrics = Metrics(write_lines(tmp_path / "metrics.jsonl", rows))
    metrics.poll()
    return Snapshot(
        "demo", 250, metrics, "running", 83, 2, 0.8,
        services=[
            ServiceStatus("buffer", "buffer", "serving", figures={
                "buffer_open_draws": 12, "buffer_outstanding_groups": 130, "buffer_bytes": 3.2e6, "buffer_quota_bytes": 1e9}),
            ServiceStatus("rollout-0", "rollout", "serving", version=41, version_step=39, restarts=1),
            ServiceStatus("trainer-0", "trainer", "serving", waiting_for="batch 41: 3 groups unfinished", waited_s=4)],
        events=[(1000.0, "rollout-0 was killed by SIGKILL; starting it again in 0.2 s (restart 1)")])


def test_the_view_shows_everything(tmp_path: Path) -> None:
    """Step, reward and curve, speed, lag, gap, buffer, versions, waits, restarts: all on one screen of 100 columns."""
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=False).print(draw(a_snapshot(tmp_path), 100))
    text = out.getvalue()
    for expected in (
        "demo", "step 40/250", "52 s left at 4.00 steps/s", "0.477 of 0.8", "▁", "█", "45.7k tokens/s", "waits 50.0%",
        "0.90 mean", "2.0e-03 mean", "12 draws open, 130 outstanding", "3.2 MB of 1000", "41 (step 39)",
        "batch 41: 3 groups unfinished", "4 s", "rollout-0 was killed",
    ):
        assert expected in text, f"{expected!r} is not in\n{text}"
    assert max(map(len, text.splitlines())) <= 100


def test_the_view_before_the_first_step(tmp_path: Path) -> None:
    """Nothing known yet is a dash, not an error."""
    out = io.StringIO()
    Console(file=out, width=80).print(draw(Snapshot("demo", 10, Metrics(tmp_path / "none")), 80))
    assert "step 0/10" in out.getvalue()


def test_plain_line(tmp_path: Path) -> None:
    """One line with the same figures."""
    snapshot = a_snapshot(tmp_path)
    assert line(snapshot).split(" ", 1)[1] == (
        "step 40/250  reward 0.48  tokens/s 45.7k  lag 0.9  gap 2.00e-03  versions 41  restarts 1")
    snapshot.services[0].figures["failed_groups"] = 3
    assert "  failed groups 3  " in line(snapshot)
    assert waits_line(a_snapshot(tmp_path)).split(" ", 1)[1] == (
        "step 40/250  buffer serving; rollout-0 serving; trainer-0 serving, waits 4 s for batch 41: 3 groups unfinished")
    assert [duration(s) for s in (5, 184, 7384)] == ["5 s", "3:04", "2:03:04"]


# -- the end of a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "found", "expected"), [
    (0.8, Audit(20, 40, 20, 0, 0), 0), (0.9, Audit(20, 40, 20, 0, 0), 1), (None, Audit(20, 40, 20, 1, 0), 1),
    (None, Audit(20, 40, 20, 0, None), 1),
])
def test_last_line_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: float | None, found: Audit, expected: int,
) -> None:
    """The last line is the result; missing the target or a dirty audit is a failure, said above it."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "reward_mean": 0.27 if s <= 10 else 0.84} for s in range(1, 21)])
    code = report(a_run(tmp_path, target_reward=target), RunFolder(tmp_path), Ending("finished"), found, started=0.0)
    out, err = capsys.readouterr()
    assert code == expected
    last = out.strip().splitlines()[-1]
    assert last.startswith("reward 0.27 -> 0.84 in 20 steps, ") and last.endswith(f"s, {found.sentence}")
    assert bool(err) == bool(expected)


@pytest.mark.parametrize(("before", "said"), [(0, "in 20 steps, 9 s, "), (12, "in 20 steps, the last 8 of them in 9 s, "),
                                              (20, "in 20 steps, none of them now, ")])
def test_the_seconds_of_a_start_are_those_of_its_own_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, before: int, said: str,
) -> None:
    """A run that goes on, or is finished already, does not claim earlier steps for this start's time."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": s, "reward_mean": 0.5} for s in range(1, 21)])
    monkeypatch.setattr("slipstream.cli.run.time.monotonic", lambda: 9.0)
    report(a_run(tmp_path), RunFolder(tmp_path), Ending("finished"), Audit(20, 40, 20, 0, 0), 0.0, before)
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_groups_that_failed_are_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An environment that raises for some tasks is no silent loss."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "reward_mean": 0.5}])
    for failed, told in ((0, False), (39, True)):
        balance = Balance(made=679, dropped=40, open=0, numbered_batch=1, groups_per_batch=2, failed=failed)
        report(a_run(tmp_path), RunFolder(tmp_path), Ending("finished"), Audit(1, 4, 2, 0, 0), 0.0, 0, balance)
        assert ("failed   39 of 679 groups" in capsys.readouterr().out) == told


@pytest.mark.parametrize(("state", "said"), [
    (None, "was not started yet"), ({"state": "ended", "ending": vars(Ending("finished"))}, "is finished"),
    ({"state": "ended", "ending": vars(Ending("failed", "no GPU", 1))}, "failed: no GPU"),
    ({"state": "ended", "ending": vars(Ending("stopped"))}, "was stopped: `slipstream run`"),
    ({"state": "running", "ending": None}, "its supervisor was killed"),
    ({"state": "draining buffer", "ending": vars(Ending("stopped"))}, "its supervisor was killed"),
])
def test_status_says_how_a_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any] | None, said: str,
) -> None:
    """And the time in its line is that of the last step, not of the question."""
    run = a_run(tmp_path)
    folder = RunFolder(tmp_path)
    write_run_file(folder, run, "127.0.0.1:1")
    write_lines(folder.metrics, [{"step": 1, "reward_mean": 0.5, "time_unix": 3600.0}])
    if state is not None:
        write_json(folder.state, {"processes": {}, **state})
    status(str(tmp_path), as_json=False)
    line, *_, last = capsys.readouterr().out.splitlines()
    assert said in last
    assert state is None or line.startswith(time.strftime("%H:%M:%S", time.localtime(3600.0)))


# -- processes ----------------------------------------------------------------------------------------------------------


def test_restart_policy(tmp_path: Path) -> None:
    """Delays double up to the most; a healthy life or a kill from outside forgives; too many quick deaths are a loop."""
    process = Process(Command("x-0", "x", [], tmp_path / "x.log"), Limits(crash_loop=8), {})
    quick, healthy = Death(1, 2.0, True, ""), Death(1, 61.0, True, "")
    assert [process.judge(quick) for _ in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    assert process.judge(healthy) == 0.2
    assert [process.judge(Death(-signal.SIGKILL, 2.0, True, "")) for _ in range(20)] == [0.2] * 20
    assert [process.judge(quick) for _ in range(6)][-1] == 10.0
    assert process.judge(quick) is None


def test_last_words(tmp_path: Path) -> None:
    """The last error of a JSON log, whatever was printed after it; the last line of a later traceback; only of this life."""
    log = tmp_path / "x.log"
    log.write_text('{"level": "error", "message": "old"}\n')
    start = log.stat().st_size
    with log.open("a") as file:
        file.write('{"level": "error", "message": "disk is full"}\n{"level": "info", "message": "stopped"}\n')
    assert last_words(log, start) == "disk is full"
    start = log.stat().st_size
    with log.open("a") as file:
        file.write('{"level": "error", "message": "earlier"}\n'
                   'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: bad\n')
    assert last_words(log, start) == "ValueError: bad"
    start = log.stat().st_size
    with log.open("a") as file:
        file.write('{"level": "error", "message": "experts = 3 do not divide"}\n{"level": "info", "message": "stopped"}\n'
                   "W1130 09:23:08 Sending process 7 closing signal SIGTERM\nranks of the trainer ended: {0: 2, 1: 2}\n")
    assert last_words(log, start) == "experts = 3 do not divide"
    start = log.stat().st_size
    with log.open("a") as file:
        file.write('{"level": "info", "message": "serving"}\nerror: no such option\n')
    assert last_words(log, start) == "error: no such option"
    assert last_words(log, log.stat().st_size) == "" and last_words(tmp_path / "none") == ""


# -- TOML and Redis -----------------------------------------------------------------------------------------------------


def test_toml_round_trip() -> None:
    """What is written is read back: tables in tables, lists of tables, quotes, floats, no null."""
    data = {"run": {"name": 'a "b" \\ ü\n', "x": 1e-06, "on": True, "none": None, "odd key": [1, 2.5]},
            "model": {"build": {"config": {"rope": {"theta": 1.0}}, "chars": "0=\x7f"}},
            "environments": [{"name": "a", "args": {"n": 1}}, {"name": "b", "args": {}}], "empty": {}}
    expected = {**data, "run": {k: v for k, v in data["run"].items() if v is not None}}
    assert tomllib.loads(toml_text.dumps(data)) == expected


def test_redis_socket_paths_are_short(tmp_path: Path) -> None:
    """A unix socket's path holds about a hundred bytes: deep run folders get one elsewhere."""
    assert embedded_redis.socket_path(Path("/tmp/r")) == Path("/tmp/r/redis.sock")
    elsewhere = embedded_redis.socket_path(Path("/tmp") / ("d" * 120))
    assert len(str(elsewhere)) < 100 and elsewhere.parent.is_dir()
    elsewhere.parent.rmdir()


@pytest.mark.parametrize(("durability", "appendonly", "fsync"), [
    ("always", "yes", "always"), ("everysec", "yes", "everysec"), ("memory", "no", "everysec")])
async def test_redis_settings(tmp_path: Path, durability: str, appendonly: str, fsync: str) -> None:
    """The embedded server runs with the durability of the run file and never evicts."""
    from redis.asyncio import Redis

    socket = embedded_redis.socket_path(tmp_path)
    argv = embedded_redis.command(embedded_redis.binary(), socket, tmp_path, durability)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    try:
        await embedded_redis.wait_ready(socket, 10)
        async with Redis.from_url(f"unix://{socket}", decode_responses=True) as client:
            found = await client.config_get("*")
    finally:
        process.terminate()
        await process.wait()
    assert (found["appendonly"], found["appendfsync"]) == (appendonly, fsync)
    assert found["maxmemory-policy"] == "noeviction" and found["save"] == "" and found["port"] == "0"
