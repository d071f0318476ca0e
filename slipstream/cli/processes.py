"""One supervised process: start it in its own group, hear of its death, judge it, stop it.

    starting -> running -> (dies) backing off -> starting ...
                        -> finished   (exit 0 of a worker: nothing left to do)
                        -> stopped    (asked to)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.cli.run_folder import read_json

CONFIGURATION_ERROR, FENCED = 2, 3  # exit codes with which a service says that starting it again is useless


@dataclass(frozen=True)
class Limits:
    """Times of the supervisor, in seconds, and its patience."""

    backoff_first_s: float = 0.2
    backoff_most_s: float = 10.0
    healthy_s: float = 60.0  # a life of this long forgives the deaths before it
    crash_loop: int = 6  # quick deaths in a row that stop the run
    ready_s: float = 30.0  # Redis reads its file within this
    inspect_s: float = 5.0  # the balance is taken from the buffer within this
    orphan_grace_s: float = 5.0  # per stage, when the supervisor was killed
    drain_s: Mapping[str, float] = field(default_factory=lambda: {
        "rollout": 15.0, "reward": 15.0, "trainer": 60.0, "buffer": 15.0, "redis": 15.0})


@dataclass(frozen=True)
class Command:
    """How a process is started."""

    instance: str  # "rollout-0"
    service: str  # "rollout"
    argv: Sequence[str]
    log: Path
    registration: Path | None = None  # services/<instance>.json, which the process writes once it serves


@dataclass(frozen=True)
class Death:
    """How a process ended: its exit code (negative = signal), how long it lived, and its last words."""

    code: int
    lived_s: float
    served: bool
    last_words: str
    asked: bool = False  # it stopped in order because somebody sent it SIGTERM or SIGINT, not because it was finished

    @property
    def sentence(self) -> str:
        if self.code == -signal.SIGKILL:
            return "was killed by SIGKILL (by hand, or by the kernel for want of memory)"
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"exited with {self.code}" + (f": {self.last_words}" if self.last_words else "")


class Process:
    """A process that the supervisor keeps alive. Not started yet when built."""

    def __init__(self, command: Command, limits: Limits, environment: Mapping[str, str], inherit: Sequence[int] = ()) -> None:
        self.command = command
        self.limits = limits
        self.state = "starting"
        self.restarts = 0
        self.quick_deaths = 0
        self.wanted = asyncio.Event()  # set = a finished worker is started again
        self._environment = dict(environment)
        self._inherit = tuple(inherit)
        self._process: asyncio.subprocess.Process | None = None
        self._born = 0.0
        self._log_start = 0

    @property
    def instance(self) -> str:
        return self.command.instance

    @property
    def service(self) -> str:
        return self.command.service

    @property
    def pid(self) -> int | None:
        """Process id, which is also its group; None when it is not there."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def last_pid(self) -> int | None:
        """Process id of the present or the last life."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> int:
        """Start the process in its own session, output appended to its log. Returns the process id."""
        if self.command.registration is not None:
            self.command.registration.unlink(missing_ok=True)
        with self.command.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.command.argv, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                start_new_session=True, pass_fds=self._inherit)
        self._born = time.monotonic()
        self.state = "running"
        return self._process.pid

    async def wait(self) -> Death:
        """Wait for the death of the running process, and end what it left in its group."""
        assert self._process is not None
        code = await self._process.wait()
        self.kill(self._process.pid)
        served = self.serving
        if self.command.registration is not None:
            self.command.registration.unlink(missing_ok=True)
        log, start = self.command.log, self._log_start
        return Death(code, time.monotonic() - self._born, served, last_words(log, start), asked_to_stop(log, start))

    @property
    def serving(self) -> bool:
        """True once the present process has said where it serves."""
        if self.command.registration is None or self._process is None:
            return False
        registered = read_json(self.command.registration)
        return registered is not None and registered.get("pid") == self._process.pid

    def judge(self, death: Death) -> float | None:
        """Seconds until the next start; None = a crash loop, starting it again is useless.

        A healthy life resets the count. SIGKILL of a process that served came from outside and is no sign of a loop.
        """
        if death.lived_s >= self.limits.healthy_s or (death.code == -signal.SIGKILL and death.served):
            self.quick_deaths = 0
        self.quick_deaths += 1
        if self.quick_deaths >= self.limits.crash_loop:
            return None
        return min(self.limits.backoff_first_s * 2 ** (self.quick_deaths - 1), self.limits.backoff_most_s)

    async def stop(self, limit_s: float) -> bool:
        """SIGTERM, then SIGKILL to its group after the limit. False when it had to be killed."""
        self.state = "stopped" if self.state != "finished" else self.state
        process = self._process
        if process is None or process.returncode is not None:
            return True
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            self.kill()
            await process.wait()
            return False
        return True

    def kill(self, group: int | None = None) -> None:
        """SIGKILL to every process of its group. Without `group` it is the present life that is ended by it."""
        if group is None and self.pid is not None:
            self.state = "killed"
        group = group or self.pid
        if group is not None:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # the group is gone (macOS says EPERM for a zombie)
                return


def asked_to_stop(log: Path, start: int = 0) -> bool:
    """Whether a log, from byte `start` on, ends with the end of a stop that a signal began: see slipstream/lifecycle.py."""
    for line in reversed(_tail(log, start)):
        with contextlib.suppress(json.JSONDecodeError, AttributeError):
            record = json.loads(line)
            if record.get("message") == "stopped":
                return record.get("reason") in ("SIGTERM", "SIGINT")
    return False


def _tail(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 65536))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def last_words(log: Path, start: int = 0) -> str:
    """The last error in a log of JSON lines, from byte `start` on, in one line; else its last line.

    A traceback that was printed after that error, or without one, is later: its last line is what counts.
    """
    words, printed = "", ""
    for line in reversed(_tail(log, start)):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if line.startswith("Traceback (most recent call last):") and printed:
                return printed[:500]
            printed = printed or line.strip()
            continue
        if not isinstance(record, dict):
            continue
        message = str(record.get("message", "")).splitlines()
        if message and str(record.get("level", "")).lower() in ("error", "critical", "fatal"):
            detail = str(record.get("error", "")).strip().splitlines()
            return (message[-1] + (f": {detail[-1]}" if detail and detail[-1] not in message[-1] else ""))[:500]
        words = words or (message[-1] if message else line.strip())
    return (printed or words)[:500]
