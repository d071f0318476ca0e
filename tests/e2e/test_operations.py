"""docs/guides/operations.md, executed: each command that needs no cluster is run by a test, this one or one named here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.audit import rows
from tests.e2e import runs
from tests.e2e.test_kills import wait_until

GUIDE = (runs.ROOT / "docs/guides/operations.md").read_text()
PLAYED = "test_operations::test_what_on_call_does_to_a_run"
# First words of a command of the guide -> the test that runs it.
EXECUTED = {
    "slipstream status": PLAYED, "slipstream watch": PLAYED, "slipstream ledger": PLAYED, "slipstream run": PLAYED,
    "kill PID": PLAYED, "python -m services.rollout": PLAYED,
    "slipstream replay": "test_replay::test_a_run_is_replayed_and_forked",
    "slipstream fork": "test_replay::test_a_run_is_replayed_and_forked",
    "slipstream certs": "test_security_run::test_a_run_with_everything_on",
    "make test-upgrade": "test_upgrade::test_a_run_is_upgraded_service_by_service",
}
ON_A_CLUSTER = ("helm", "kubectl")  # tests/charts: rendered, and tried on a stand-in API server


def commands() -> list[str]:
    """What stands in backquotes, or in a block of its own, and begins like a command."""
    found = [*re.findall(r"`([^`\n]+)`", GUIDE), *re.findall(r"^    (\S.*)$", GUIDE, re.M)]
    return [each for each in found if re.match(r"(slipstream|python|make|kill|helm|kubectl|git|redis-cli|pip) ", each)]


def test_every_command_of_the_guide_is_executed_by_a_test() -> None:
    """A command that nobody runs is one that nobody knows to work; the tests named above exist."""
    unknown = [each for each in commands() if not each.startswith((*EXECUTED, *ON_A_CLUSTER))]
    assert not unknown, unknown
    unused = [each for each in EXECUTED if not any(command.startswith(each) for command in commands())]
    assert not unused, unused
    for name in set(EXECUTED.values()):
        module, _, test = name.partition("::")
        path, = (runs.ROOT / "tests").glob(f"*/{module}.py")
        assert f"def {test}(" in path.read_text(), name


class Live:
    """A run of `slipstream run` and the commands of the guide on it."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder, self.processes = path, path.parent / "run", []

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.processes.append(process := runs.start("run", str(self.path), "--plain", *options))
        return process

    def say(self, *words: str) -> str:
        """Output of a command on the run."""
        return runs.finish(runs.start(*words), 240)

    def status(self) -> dict[str, dict[str, Any]]:
        """The services of `slipstream status --json` by instance."""
        found = json.loads(self.say("status", str(self.folder), "--json"))
        return {service["instance"]: service for service in found["services"]}

    def steps(self) -> int:
        return sum(1 for _ in rows(self.folder / "audit" / "trainer.jsonl"))

    def get_on(self, steps: int = 2) -> None:
        """Wait until it has trained some more."""
        before = self.steps()
        wait_until(lambda: self.steps() >= before + steps, 240)

    def handed_in(self, instance: str) -> int:
        """Samples of a worker that the buffer has acknowledged."""
        return sum(1 for _ in rows(self.folder / "audit" / f"{instance}.jsonl"))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_what_on_call_does_to_a_run(tmp_path: Path, model_dir: Any) -> None:
    """Look, resize, upgrade each service, pause, change settings, restore without Redis: in one run, which loses nothing."""
    live = Live(runs.write_run_file(tmp_path, model_dir(), {
        "run": {"steps": 10_000}, "service": {"audit": True}, "buffer": {"durability": "always"},
        "rollout": {"slots": 16, "context": 32, "max_new_tokens": 6}}))
    try:
        play(live)
    finally:
        for process in live.processes:
            process.kill()


def play(live: Live) -> None:
    process = live.start()
    wait_until(lambda: live.steps() >= 2, 240)
    # look
    assert live.status()["buffer"]["state"] == "serving"
    assert re.search(r"adds up +yes", live.say("ledger", str(live.folder), "--dead"))
    watching = runs.start("watch", str(live.folder))
    # resize: one more worker, beside those of the supervisor
    address = live.status()["buffer"]["address"]
    more = subprocess.Popen(
        [sys.executable, "-m", "services.rollout", "--run-file", str(live.folder / "run.json"), "--instance", "rollout-9",
         "--buffer", address], cwd=runs.ROOT, env=runs.ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_until(lambda: live.handed_in("rollout-9") > 0, 240)
    assert live.status()["rollout-9"]["state"] == "serving"
    more.terminate()
    assert more.wait(240) == 0
    # upgrade: each service is asked to stop, and started again with the code that is there
    for instance in ("buffer", "reward-0", "rollout-0", "trainer-0"):
        before = live.status()[instance]["pid"]
        os.kill(before, signal.SIGTERM)
        wait_until(lambda name=instance, pid=before: live.status()[name]["pid"] not in (0, pid), 240)
        live.get_on()
    # pause, and go on
    process.send_signal(signal.SIGINT)
    assert "was asked to stop; starting it again" in (output := runs.finish(process, 240)) and "stopped at step" in output
    assert "lost 0, repeated 0" in output.splitlines()[-1] and watching.wait(240) == 0
    settings_change(live)
    restore(live)


def settings_change(live: Live) -> None:
    """Steps and ranks may change; what decides the weights is a fork, and the sentence says so."""
    steps = live.steps()
    refused, _ = (process := live.start("--set", "trainer.learning_rate=0.5")).communicate(timeout=240)
    assert process.returncode == 2 and "trainer.learning_rate was 0.001 and is 0.5" in refused and live.steps() == steps
    live.path.write_text(json.dumps(json.loads(live.path.read_text()) | {
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 2, "parallel": {"ranks": 2}}}))
    process = live.start()
    live.get_on()
    process.send_signal(signal.SIGINT)
    assert "lost 0, repeated 0" in runs.finish(process, 240).splitlines()[-1]


def restore(live: Live) -> None:
    """Redis is gone with all that was in flight: the ledger is rebuilt from the batch log, and the run finishes."""
    shutil.rmtree(live.folder / "redis")
    steps = max(row["batch"] for row in rows(live.folder / "audit" / "trainer.jsonl")) + 4
    assert "repeated 0" in runs.finish(live.start("--set", f"run.steps={steps}"), 240).splitlines()[-1]
    account = live.say("ledger", str(live.folder))
    assert re.search(r"draws +\d+ by this ledger, \d+ before it began", account) and re.search(r"adds up +yes", account)
