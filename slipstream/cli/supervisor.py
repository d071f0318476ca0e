"""The supervisor: starts a run's processes on this machine, restarts what dies, stops them in order.

consumes      the run file, the run folder, exit codes, Ctrl-C
produces      processes, <folder>/run.json, <folder>/supervisor.json, events (sentences) for the view
waits for     the trainer's exit 0 (the run is over), a request to stop, or a death that restarting cannot mend
unblocked by  any of the three; every stage of the stop has a time limit, a second request kills at once

It owns no state of the run: everything durable is in Redis and the object store, and services find each other through the
buffer, so it may be killed and started again at any time. `guard.py` ends the processes of a killed supervisor.

Exit codes of services: 0 = done, 2 = configuration error and 3 = fenced by a newer process (stop the run and say the service's
last words), anything else = start it again; and so is what ended with 0 because somebody else asked it to (`kill PID`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream import rpc
from slipstream.cli import embedded_redis, guard
from slipstream.cli.interpreters import interpreter
from slipstream.cli.processes import CONFIGURATION_ERROR, FENCED, Command, Death, Limits, Process
from slipstream.cli.run_folder import RunFolder, RunLock, write_json
from slipstream.cli.stall import LOOK_S, StallWatch
from slipstream.cli.survey import ServiceStatus
from slipstream.config import RunFile
from slipstream.errors import SlipstreamError

DRAIN_ORDER = ("rollout", "reward", "trainer", "buffer", "redis")


@dataclass(frozen=True)
class Ending:
    """Why a run's processes were stopped: `finished`, `stopped` (asked to), `killed` (asked twice) or `failed`."""

    reason: str
    error: str = ""
    code: int = 0


class Supervisor:
    """Runs one run to its end. `run()` once; `request_stop()` from a signal handler."""

    def __init__(self, run: RunFile, folder: RunFolder, lock: RunLock, *, environment: dict[str, str], prefix: str = "services",
                 limits: Limits | None = None, tell: Callable[[str], None] = lambda event: None,
                 inspect: Callable[[], Awaitable[None]] | None = None,
                 ask: Callable[[], Awaitable[Sequence[ServiceStatus]]] | None = None) -> None:
        self.run_file, self.folder, self.limits = run, folder, limits or Limits()
        self.events: deque[tuple[float, str]] = deque(maxlen=50)
        self.state = "starting"
        self.started_unix = time.time()
        self._prefix, self._lock, self._environment, self._tell, self._inspect = prefix, lock, environment, tell, inspect
        self._ask = ask  # what every process says of itself
        self._stalls = StallWatch(time.monotonic, run.service.stall_s, run.service.give_up_s)
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._ending: Ending | None = None
        self._socket: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._guard_pipe = -1
        self.processes = [Process(command, self.limits, environment, (lock.fd,)) for command in self._commands()]

    # -- what to start ------------------------------------------------------------------------------------------------

    def _commands(self) -> list[Command]:
        run, commands = self.run_file, []
        redis_url = run.buffer.redis
        if not redis_url:
            self._socket = embedded_redis.socket_path(self.folder.path)
            redis_url = f"unix://{self._socket}"
            commands.append(Command("redis", "redis", embedded_redis.command(
                embedded_redis.binary(), self._socket, self.folder.redis, run.buffer.durability), self.folder.log("redis")))
        host, _, port = run.service.buffer_address.rpartition(":")  # off loopback, workers elsewhere may join
        beyond = () if rpc.is_loopback(run.service.buffer_address) else ("--host", host.strip("[]"))
        commands.append(self._service("buffer", "buffer", "--redis", redis_url, "--port", port, *beyond))
        commands += [self._service("reward", f"reward-{i}") for i in range(run.reward.workers)]
        commands += [self._service("rollout", f"rollout-{i}") for i in range(run.rollout.workers)]
        commands.append(self._service("trainer", "trainer-0"))
        return commands

    def _service(self, service: str, instance: str, *more: str) -> Command:
        argv = [interpreter(self.run_file, service), "-m", f"{self._prefix}.{service}", "--run-file", str(self.folder.run_file),
                "--instance", instance, "--buffer", self.run_file.service.buffer_address, *more]
        return Command(instance, service, argv, self.folder.log(instance), self.folder.services / f"{instance}.json")

    # -- the life of a run --------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Start everything, keep it alive, stop it in order. Never raises for what a service does."""
        self._start_guard()
        keepers: list[asyncio.Task[None]] = []
        try:
            for process in self.processes:
                if process.service == "redis" and not await self._start_redis(process):
                    break
                keepers.append(asyncio.create_task(self._keep(process), name=f"keep {process.instance}"))
            self._change("running")
            if not self.run_file.rollout.workers:
                self.say("rollout.workers = 0: no sample is generated until a worker connects to the buffer at "
                         f"{self.run_file.service.buffer_address} (python -m services.rollout)")
            watch = [asyncio.create_task(self._watch_keepers(keepers), name="watch keepers"),
                     asyncio.create_task(self._watch_progress(), name="watch progress")]
            await self._stopping.wait()
            for task in watch:
                task.cancel()
            await self._stop(keepers)
        finally:
            for process in self.processes:
                process.kill()
            for task in keepers:
                task.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            self._end_guard()
            self._change("ended")
            if self._socket is not None:
                self._remove_socket(self._socket)
        assert self._ending is not None
        return self._ending

    def request_stop(self) -> None:
        """The first request drains, the second kills."""
        if self._stopping.is_set():
            self._ending = Ending("killed", "stopped at once: a second request came while draining", 130)
            self._killing.set()
        else:
            self.say("stopping: draining in order; ask again to stop at once")
            self._end(Ending("stopped"))

    def say(self, event: str) -> None:
        """Add an event to the view, the state file and the caller's ear."""
        self.events.append((time.time(), event))
        self._tell(event)
        self._change()

    # -- keeping processes alive --------------------------------------------------------------------------------------

    async def _keep(self, process: Process) -> None:
        """Start, wait, judge, again; returns when the run ends."""
        fresh = process.service != "redis"  # Redis was started before everybody
        while not self._stopping.is_set():
            if fresh and not await (self._start_redis(process) if process.service == "redis" else self._start(process)):
                return
            fresh = True
            death = await process.wait()
            self._forget(process)
            if self._stopping.is_set():
                return
            await self._after(process, death)

    async def _start(self, process: Process) -> bool:
        """False when the stop came first: nothing may start behind the drain's back."""
        if self._stopping.is_set():
            return False
        try:
            pid = await process.start()
        except OSError as error:
            self._end(Ending("failed", f"{process.instance} cannot be started: {error}", 1))
            return False
        self._tell_guard(f"add {pid} {DRAIN_ORDER.index(process.service)}")
        self._change()
        return True

    async def _start_redis(self, process: Process) -> bool:
        assert self._socket is not None
        self._socket.unlink(missing_ok=True)
        if not await self._start(process):
            return False
        ready = asyncio.create_task(embedded_redis.wait_ready(self._socket, self.limits.ready_s))
        died = asyncio.create_task(process.wait())
        await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        try:
            if ready.done():
                await ready
            ready.cancel()
        except SlipstreamError as error:
            self._end(Ending("failed", f"{error}; its log is {process.command.log}", 1))
            return False
        return True

    async def _after(self, process: Process, death: Death) -> None:
        """What follows a death: the end of the run, a rest, or a restart, mostly after a delay."""
        asked = death.code == 0 and death.asked  # as a pod that is deleted: another follows, with the code that is there now
        if death.code == 0 and not asked and process.service == "trainer":
            process.state = "finished"
            self._end(Ending("finished"))
            return
        if death.code == 0 and not asked and process.service in ("rollout", "reward"):
            process.state = "finished"
            self._change()
            await self._unless_stopping(process.wanted.wait())
            process.wanted.clear()
            return
        if death.code in (CONFIGURATION_ERROR, FENCED):
            words = death.last_words or f"{process.instance} exited with {death.code}; its log is {process.command.log}"
            self._end(Ending("failed", words, CONFIGURATION_ERROR if death.code == CONFIGURATION_ERROR else 1))
            return
        delay_s = 0.0 if asked else process.judge(death)
        if delay_s is None:
            self._end(Ending("failed", f"{process.instance} died {process.quick_deaths} times in a row and was given up: it "
                             f"{death.sentence}; its log is {process.command.log}", 1))
            return
        process.restarts += 1
        process.state = "backing off"
        sentence = "was asked to stop" if asked else death.sentence
        self.say(f"{process.instance} {sentence}; starting it again in {delay_s:g} s (restart {process.restarts})")
        if process.service in ("trainer", "buffer", "redis"):  # there may be work again for workers that had finished
            for other in self.processes:
                if other.state == "finished":
                    other.wanted.set()
        await self._unless_stopping(asyncio.sleep(delay_s))
        process.state = "starting"

    async def _unless_stopping(self, what: Awaitable[object]) -> None:
        """Wait for `what` or for the stop."""
        waits = {asyncio.ensure_future(what), asyncio.ensure_future(self._stopping.wait())}
        _, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()

    async def _watch_keepers(self, keepers: list[asyncio.Task[None]]) -> None:
        """A keeper that raises is a bug of ours: stop the run rather than supervise half of it."""
        for task in asyncio.as_completed(keepers):
            try:
                await task
            except Exception as error:
                self._end(Ending("failed", f"the supervisor failed: {type(error).__name__}: {error}", 1))

    async def _watch_progress(self) -> None:
        """Say when the run does not get on; end it when that lasts. Never raises: nobody would hear."""
        stalls = self._stalls
        while self._ask is not None:
            await asyncio.sleep(min(LOOK_S, self.run_file.service.stall_s / 4))
            with contextlib.suppress(SlipstreamError, OSError):
                event, shown = stalls.look(await self._ask()), stalls.stall
                if event:
                    self.say(event)
                elif shown is not None:
                    self._change()
            if stalls.over:
                self._end(Ending("failed", stalls.over, 1))
                return

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, ending: Ending) -> None:
        """The first ending wins."""
        if self._ending is None:
            self._ending = ending
        self._stopping.set()

    async def _stop(self, keepers: list[asyncio.Task[None]]) -> None:
        """Drain stage by stage, or kill when asked again."""
        drain = asyncio.create_task(self._drain(), name="drain")
        kill = asyncio.create_task(self._killing.wait(), name="second request")
        await asyncio.wait({drain, kill}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, kill):
            task.cancel()
        for process in self.processes:
            process.kill()
        with contextlib.suppress(asyncio.CancelledError):
            await drain
        if keepers:
            await asyncio.wait(keepers, timeout=5.0)

    async def _drain(self) -> None:
        for service in DRAIN_ORDER:
            members = [p for p in self.processes if p.service == service]
            self._change(f"draining {service}")
            if service == "buffer" and self._inspect is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._inspect(), self.limits.inspect_s)
            limit_s = self.limits.drain_s[service]
            for process, clean in zip(members, await asyncio.gather(*(p.stop(limit_s) for p in members)), strict=True):
                if not clean:
                    self.say(f"{process.instance} did not drain within {limit_s:g} s and was killed")
                self._change()

    def _remove_socket(self, socket: Path) -> None:
        socket.unlink(missing_ok=True)
        if socket.parent != self.folder.path:
            with contextlib.suppress(OSError):
                socket.parent.rmdir()

    # -- the guard and the state file ---------------------------------------------------------------------------------

    def _start_guard(self) -> None:
        read_end, self._guard_pipe = os.pipe()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(read_end), str(self.limits.orphan_grace_s)], pass_fds=(read_end,),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(read_end)

    def _tell_guard(self, line: str) -> None:
        try:
            os.write(self._guard_pipe, f"{line}\n".encode())
        except BrokenPipeError:  # somebody killed the guard: the run goes on without it
            return

    def _forget(self, process: Process) -> None:
        if process.last_pid is not None:
            self._tell_guard(f"remove {process.last_pid}")

    def _end_guard(self) -> None:
        for process in self.processes:
            self._forget(process)
        os.close(self._guard_pipe)
        if self._guard is not None:
            try:
                self._guard.wait(2.0)
            except subprocess.TimeoutExpired:
                self._guard.kill()

    def _change(self, state: str = "") -> None:
        """Write the public state; `state` is the new phase of the run."""
        self.state = state or self.state
        write_json(self.folder.state, {
            "run": self.run_file.run.name, "pid": os.getpid(), "state": self.state, "started_unix": self.started_unix,
            "processes": {p.instance: {"service": p.service, "pid": p.pid, "state": p.state, "restarts": p.restarts}
                          for p in self.processes},
            "stall": str(self._stalls.stall) if self._stalls.stall else "",
            "ending": vars(self._ending) if self._ending else None,
            "events": [{"time_unix": at, "event": event} for at, event in self.events],
        })
