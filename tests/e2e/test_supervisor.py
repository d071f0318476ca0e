"""The supervisor with real processes, a real Redis and services that live and die as each test says (fake_services)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.run_folder import RunFolder, alive, held, read_json
from tests.e2e.fake_services import events

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
DRIVER = """
import sys, json, time
from slipstream.cli import explain, run as command
from slipstream.cli.processes import Limits
from slipstream.config import load
try:
    code = command.run(load(sys.argv[1]), command.Options(
        plain=True, prefix="tests.e2e.fake_services", limits=Limits(**json.loads(sys.argv[2])), started=time.monotonic()))
except Exception as error:
    code = explain(error)
sys.exit(code)
"""
LIMITS = {"backoff_first_s": 0.05, "backoff_most_s": 0.1, "inspect_s": 0.2, "orphan_grace_s": 0.5}


class Driven:
    """A supervisor in a process of its own, and what it and its services did."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.path = folder
        self.run_file = folder.parent / "run.toml"
        self.process: subprocess.Popen[str] | None = None

    def write(self, script: dict[str, list[dict[str, Any]]] | None = None, steps: int = 100, more: str = "") -> None:
        """The run file and the script of its services."""
        self.path.mkdir(exist_ok=True)
        (self.path / "lock").touch()
        (self.path / "script.json").write_text(json.dumps(script or {}))
        self.run_file.write_text(f"""
            run = {{ name = "driven", folder = "{self.path}", steps = {steps} }}
            model.build = {{ model_type = "qwen3_moe" }}
            environments = [{{ name = "sort", entry = "slipstream.environments.sort_digits:SortDigits" }}]
            buffer.durability = "memory"
            {more}
        """.replace("            ", ""))

    def start(self, **limits: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(self.run_file), json.dumps(LIMITS | limits)], cwd=REPOSITORY, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)})

    def end(self) -> tuple[int, str]:
        """Exit code and output of the supervisor."""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def happened(self, event: str, *instances: str) -> list[dict[str, Any]]:
        return [e for e in events(self.path) if e["event"] == event and (not instances or e["instance"] in instances)]

    def all_up(self) -> bool:
        return {e["instance"] for e in self.happened("start")} == {"buffer", "reward-0", "rollout-0", "trainer-0"}

    def pids(self) -> list[int]:
        """Every process that was ever started, Redis included."""
        state = read_json(self.folder.state) or {}
        redis = state.get("processes", {}).get("redis", {}).get("pid")
        return [e["pid"] for e in self.happened("start")] + ([redis] if redis else [])


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    driven = Driven(tmp_path / "run")
    yield driven
    if driven.process is not None and driven.process.poll() is None:
        driven.process.kill()
        driven.process.communicate()


def wait_until(what: Callable[[], bool], seconds: float = 15.0) -> None:
    """Return as soon as `what` holds; fail after the time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def test_the_run_is_over_when_the_trainer_is(driven: Driven) -> None:
    """Exit 0 of the trainer ends the run: the rest is drained in the order of the walk, nothing is left, exit code 0."""
    driven.write({"trainer-0": [{"exit": 0, "after_s": 0.2}]})
    driven.start()
    code, output = driven.end()
    assert code == 0, output
    assert [e["instance"] for e in driven.happened("term")] == ["rollout-0", "reward-0", "buffer"]
    assert not [pid for pid in driven.pids() if alive(pid)]
    assert not held(driven.folder)
    assert read_json(driven.folder.state)["state"] == "ended"
    assert not (driven.path / "redis.sock").exists()


def test_what_dies_is_started_again(driven: Driven) -> None:
    """Deaths in a row are answered after a doubling delay, and told; others are not touched."""
    driven.write({"reward-0": [{"exit": 1, "after_s": 0, "say": "scorer broke"}, {"exit": 7, "after_s": 0}, {}]})
    driven.start()
    wait_until(lambda: len(driven.happened("start", "reward-0")) == 3 and driven.all_up())
    wait_until(lambda: (driven.folder.services / "reward-0.json").exists())
    driven.signal(signal.SIGTERM)
    code, output = driven.end()
    assert code == 0, output
    assert "reward-0 exited with 1: scorer broke; starting it again in 0.05 s (restart 1)" in output
    assert "reward-0 exited with 7; starting it again in 0.1 s (restart 2)" in output
    ends, starts = driven.happened("end", "reward-0"), driven.happened("start", "reward-0")
    assert starts[1]["at"] - ends[0]["at"] >= 0.05 and starts[2]["at"] - ends[1]["at"] >= 0.1
    assert len(driven.happened("start", "rollout-0")) == 1
    assert (read_json(driven.folder.state) or {})["processes"]["reward-0"]["restarts"] == 2


def test_killed_processes_come_back_redis_and_buffer_too(driven: Driven) -> None:
    """SIGKILL of any process is survived; the buffer comes back on its port."""
    driven.write()
    driven.start()
    wait_until(driven.all_up)
    redis = (read_json(driven.folder.state) or {})["processes"]["redis"]["pid"]
    os.kill(redis, signal.SIGKILL)
    for instance in ("rollout-0", "buffer"):
        os.kill(driven.happened("start", instance)[0]["pid"], signal.SIGKILL)
    wait_until(lambda: len(driven.happened("start", "rollout-0")) == 2 and len(driven.happened("start", "buffer")) == 2)
    wait_until(lambda: (read_json(driven.folder.state) or {})["processes"]["redis"]["pid"] not in (redis, None))
    first, second = driven.happened("start", "buffer")
    assert first["port"] == second["port"] and first["redis"] == second["redis"]
    assert {e["buffer"] for e in driven.happened("start")} == {f"127.0.0.1:{first['port']}"}
    driven.signal(signal.SIGTERM)
    code, output = driven.end()
    assert code == 0, output
    assert "buffer was killed by SIGKILL" in output


def test_who_is_asked_to_stop_is_started_again(driven: Driven) -> None:
    """`kill PID` is how one service gets new code: no end of the run, though the trainer's exit code is 0, and no delay."""
    driven.write()
    driven.start()
    wait_until(driven.all_up)
    for instance in ("trainer-0", "rollout-0", "reward-0", "buffer"):
        os.kill(driven.happened("start", instance)[0]["pid"], signal.SIGTERM)
        wait_until(lambda name=instance: len(driven.happened("start", name)) == 2)
    driven.signal(signal.SIGTERM)
    code, output = driven.end()
    assert code == 0, output
    assert "trainer-0 was asked to stop; starting it again in 0 s (restart 1)" in output


@pytest.mark.parametrize(("said_by_service", "expected"), [(2, 2), (3, 1)])
def test_what_restarting_cannot_mend_stops_the_run(driven: Driven, said_by_service: int, expected: int) -> None:
    """A configuration error (2) or a fence (3): the run stops, the service's last words are the line that the user sees."""
    driven.write({"buffer": [{"exit": said_by_service, "after_s": 0, "say": "environments.sort: no such data; set args.path"}]})
    driven.start()
    code, output = driven.end()
    assert code == expected
    assert output.strip().splitlines()[-1] == "slipstream: environments.sort: no such data; set args.path"
    assert len(driven.happened("start", "buffer")) == 1
    assert not [pid for pid in driven.pids() if alive(pid)]


def test_crash_loop_gives_up(driven: Driven) -> None:
    """Quick deaths in a row end the run with the last error and the log's path."""
    driven.write({"rollout-0": [{"exit": 1, "after_s": 0, "say": "no memory for slots"}]})
    driven.start(crash_loop=3)
    code, output = driven.end()
    assert code == 1
    assert "rollout-0 died 3 times in a row and was given up: it exited with 1: no memory for slots" in output
    assert str(driven.folder.log("rollout-0")) in output
    assert len(driven.happened("start", "rollout-0")) == 3


def test_control_c_drains_in_order(driven: Driven) -> None:
    """Rollout, reward, trainer, buffer: each has ended before the next is asked; then Redis. Exit code 0."""
    driven.write()
    driven.start()
    wait_until(driven.all_up)
    driven.signal(signal.SIGINT)
    code, output = driven.end()
    assert code == 0, output
    order = [(e["instance"], e["event"]) for e in events(driven.path) if e["event"] != "start"]
    assert order == [(i, e) for i in ("rollout-0", "reward-0", "trainer-0", "buffer") for e in ("term", "end")]
    assert "User requested shutdown" in driven.folder.log("redis").read_text()


def test_drain_has_a_time_limit(driven: Driven) -> None:
    """A process that does not end is killed after its stage's limit, by name, and the drain goes on."""
    driven.write({"rollout-0": [{"ignore_term": True}]})
    driven.start(drain_s={"rollout": 0.2, "reward": 5, "trainer": 5, "buffer": 5, "redis": 5})
    wait_until(driven.all_up)
    driven.signal(signal.SIGINT)
    code, output = driven.end()
    assert code == 0, output
    assert "rollout-0 did not drain within 0.2 s and was killed" in output
    assert [e["instance"] for e in driven.happened("end")] == ["reward-0", "trainer-0", "buffer"]


def test_second_control_c_stops_at_once(driven: Driven) -> None:
    """The second request kills everything without waiting, and the exit code says so."""
    driven.write({"rollout-0": [{"ignore_term": True}]})
    driven.start(drain_s={"rollout": 60, "reward": 60, "trainer": 60, "buffer": 60, "redis": 60})
    wait_until(driven.all_up)
    driven.signal(signal.SIGINT)
    wait_until(lambda: bool(driven.happened("term", "rollout-0")))
    driven.signal(signal.SIGINT)
    code, output = driven.end()
    assert code == 130, output
    assert not driven.happened("term", "buffer")
    assert not [pid for pid in driven.pids() if alive(pid)]
    assert {p["state"] for p in (read_json(driven.folder.state) or {})["processes"].values()} == {"killed"}


def test_processes_end_with_a_killed_supervisor(driven: Driven) -> None:
    """SIGKILL of the supervisor: the guard stops its processes in order, stubborn ones too, and the lock becomes free."""
    driven.write({"trainer-0": [{"ignore_term": True}]})
    driven.start()
    wait_until(driven.all_up)
    pids = driven.pids()
    driven.signal(signal.SIGKILL)
    driven.end()
    wait_until(lambda: not [pid for pid in pids if alive(pid)])
    wait_until(lambda: not held(driven.folder))
    assert [e["instance"] for e in driven.happened("end")] == ["rollout-0", "reward-0", "buffer"]


def test_a_live_run_is_never_joined(driven: Driven) -> None:
    """A second start in the folder of a live run is refused with one line that names the process and the remedy."""
    driven.write()
    driven.start()
    wait_until(driven.all_up)
    second = Driven(driven.path)
    second.start()
    code, output = second.end()
    assert code == 2
    assert driven.process is not None
    assert output.startswith("slipstream: ") and f"locked by a live run (pid {driven.process.pid})" in output
    assert len(output.strip().splitlines()) == 1
    driven.signal(signal.SIGINT)
    assert driven.end()[0] == 0


def test_status_and_watch_follow_a_live_run(driven: Driven) -> None:
    """Both read the folder of a run that another process supervises; watch returns when the run ends."""
    driven.write({"rollout-0": [{"exit": 1, "after_s": 0}, {}]})
    driven.start()
    wait_until(lambda: driven.all_up() and len(driven.happened("start", "rollout-0")) == 2)
    command = [sys.executable, "-c", "from slipstream.cli import main; main()"]
    told = json.loads(subprocess.check_output([*command, "status", "run", "--json"], cwd=driven.path.parent, text=True))
    assert told["alive"] and told["state"] == "running"
    assert {s["instance"]: s["restarts"] for s in told["services"]} == {
        "redis": 0, "buffer": 0, "reward-0": 0, "rollout-0": 1, "trainer-0": 0}
    with subprocess.Popen([*command, "watch", "run"], cwd=driven.path.parent, text=True, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        assert "run driven" in watching.stdout.readline()
        driven.signal(signal.SIGTERM)
        rest, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0 and "rollout-0 exited with 1" in rest and "stopping: draining" in rest
    assert driven.end()[0] == 0


def test_same_settings_resume_others_are_refused(driven: Driven) -> None:
    """The folder's run goes on with the same run file, or with more steps; other settings need --fresh or another name."""
    for steps in (100, 100, 200):
        driven.write({"trainer-0": [{"exit": 0, "after_s": 0}]}, steps=steps)
        driven.start()
        code, output = driven.end()
        assert code == 0 and "the view failed" not in output
    assert (read_json(driven.folder.run_file) or {})["run"]["steps"] == 200
    driven.folder.published.write_text('{"version": 1}\n')
    driven.write({}, more="schedule.max_lag = 1")
    driven.start()
    code, output = driven.end()
    assert code == 2 and "schedule.max_lag was 2 and is 1" in output and "--fresh" in output


def test_a_run_that_does_not_get_on_ends_with_what_it_waited_for(driven: Driven) -> None:
    """Every process lives, none gets on: said after stall_s, in the state file, too, and after give_up_s an error."""
    driven.write(more="service = { stall_s = 0.5, give_up_s = 1.5 }")
    driven.start()
    code, output = driven.end()
    assert code == 1
    assert "given up: no progress for" in output.splitlines()[-1]
    assert "waiting for the buffer, which is silent; reward-0 is silent; rollout-0 is silent; trainer-0 is silent" in output
    assert output.count(" stalled: no progress for ") == 1
    assert (read_json(driven.folder.state) or {})["stall"].startswith("no progress for")
    assert len(driven.happened("end")) == 4, "drained in order"


def test_a_run_without_workers_says_so_at_once(driven: Driven) -> None:
    """rollout.workers = 0 is for workers that come from elsewhere: one event says where they have to connect."""
    driven.write({"trainer-0": [{"exit": 0, "after_s": 0.3}]}, more="rollout.workers = 0")
    driven.start()
    code, output = driven.end()
    assert code == 0 and "rollout.workers = 0: no sample is generated until a worker connects to the buffer at 127." in output
