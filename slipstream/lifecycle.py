"""How a process lives and stops: named tasks, waits that are seen, and a stop in stages.

Consumes: signals and failures (`request_stop`), the run's end (`finish`). Produces: an exit code. Waits for: `stopping`.
Unblocked by: a signal, a task that fails, `finish()`.

Stages of a stop, one after the other, each with its own deadline:
    0 not serving    health says NOT_SERVING, so that nobody sends more
    1 stop intake    take no new leases
    2 finish         finish what is in flight, or hand it back
    3 flush          write what is only in memory; the gRPC server ends its calls
    4 close          close connections; tasks that still run are cancelled just before
Loops end by themselves once `stopping` is set; those that do not are cancelled between stages 3 and 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from slipstream import logs
from slipstream.errors import ConfigError, Fenced, SlipstreamError

NOT_SERVING, STOP_INTAKE, FINISH, FLUSH, CLOSE = range(5)
STAGES = ("not serving", "stop intake", "finish or hand back", "flush", "close")
EXIT_OK, EXIT_ERROR, EXIT_CONFIG, EXIT_FENCED = 0, 1, 2, 3

log = logs.get("lifecycle")


class Clock(Protocol):
    """Time from outside, so that tests and simulations can own it."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...

    def unix(self) -> float:
        """Seconds since 1970, for people and logs."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Wait:
    """One blocking wait. Its sentence may be changed while it lasts; the time keeps counting."""

    __slots__ = ("patient", "sentence", "started")

    def __init__(self, sentence: str, started: float, patient: bool = False) -> None:
        self.sentence = sentence
        self.started = started
        self.patient = patient


class Waits:
    """What this process waits for right now. Safe to use from several threads.

    Example:
        with waits.on("batch 7") as wait:
            wait.sentence = "batch 7: 3 of 64 groups unfinished"
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._waits: dict[int, Wait] = {}

    @contextlib.contextmanager
    def on(self, sentence: str, patient: bool = False) -> Iterator[Wait]:
        """Name what the block waits for. A `patient` wait is for work of others, who answer for it: it is shown, but however
        long it lasts, it is no stall of this process.

        A loop of long polls wraps itself in one wait that lasts until work comes; otherwise each poll starts the count anew and
        a stall is never seen.
        """
        number, wait = next(self._numbers), Wait(sentence, self._clock.monotonic(), patient)
        self._waits[number] = wait
        try:
            yield wait
        finally:
            del self._waits[number]

    @property
    def current(self) -> tuple[str, float] | None:
        """The longest wait as (sentence, seconds); None while nothing waits.

        Of nested waits the outer one is older and names the goal; begin it with the sentence that people should read.
        """
        return self._oldest(list(self._waits.values()))

    @property
    def impatient(self) -> tuple[str, float] | None:
        """The longest wait that is not patient."""
        return self._oldest([w for w in list(self._waits.values()) if not w.patient])

    def _oldest(self, waits: Sequence[Wait]) -> tuple[str, float] | None:
        if not waits:
            return None
        oldest = min(waits, key=lambda w: w.started)
        return oldest.sentence, self._clock.monotonic() - oldest.started


class Lifecycle:
    """Tasks and the end of one process. `run()` returns the exit code."""

    def __init__(self, clock: Clock, stage_timeout_s: float = 60) -> None:
        self.clock = clock
        self.stage_timeout_s = stage_timeout_s
        self.stopping = asyncio.Event()
        self.reason = ""
        self.error: BaseException | None = None
        self.finished = False
        self.stay = False  # finish() changes the state only; something that restarts what exits is in charge
        self._forced = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stops: list[tuple[int, str, Callable[[], Awaitable[object]]]] = []

    def spawn(self, name: str, coro: Coroutine[Any, Any, Any], endless: bool = True) -> asyncio.Task[Any]:
        """Run a named task. If it raises, or is `endless` and returns, the process stops with an error."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda t: self._ended(t, endless))
        return task

    def on_stop(self, stage: int, stop: Callable[[], Awaitable[object]], name: str = "") -> None:
        """Call `stop` in this stage (0 to 4, see the top), after those registered earlier for the same stage."""
        if not 0 <= stage < len(STAGES):
            raise ValueError(f"stage {stage} is not one of 0 to {len(STAGES) - 1}")
        self._stops.append((stage, name or getattr(stop, "__qualname__", repr(stop)), stop))

    def request_stop(self, reason: str, error: BaseException | None = None) -> None:
        """Begin to stop. The first reason counts; the first error decides the exit code."""
        self.error = self.error or error
        if not self.stopping.is_set():
            self.reason = reason
            self.stopping.set()

    def finish(self) -> None:
        """The work is done: stop normally, with exit code 0; or, with `stay`, serve on until somebody asks to stop."""
        self.finished = True
        if not self.stay:
            self.request_stop("finished")

    async def run(self) -> int:
        """Wait until something asks to stop, stop in stages, return the exit code (EXIT_* above)."""
        await self.stopping.wait()
        log.info(f"stopping: {self.reason}")
        for stage, title in enumerate(STAGES):
            if stage == CLOSE:
                await self._cancel_tasks()
            for number, name, stop in self._stops:
                if number == stage:
                    await self._call(title, name, stop)
        log.info("stopped", reason=self.reason, forced=self._forced)
        if isinstance(self.error, ConfigError):
            return EXIT_CONFIG
        if isinstance(self.error, Fenced):
            return EXIT_FENCED
        return EXIT_ERROR if self._forced or self.error else EXIT_OK

    async def _call(self, title: str, name: str, stop: Callable[[], Awaitable[object]]) -> None:
        """One callback, within its deadline. Whatever happens, the stop goes on."""
        try:
            async with asyncio.timeout(self.stage_timeout_s):
                await stop()
        except TimeoutError:
            self._forced = True
            log.error(f"stage {title}: {name} took more than {self.stage_timeout_s} s and was left behind")
        except Exception as error:
            self.error = self.error or error
            log.exception(f"stage {title}: {name} failed", error=error)

    async def _cancel_tasks(self) -> None:
        await asyncio.sleep(0)  # what `stopping` has just woken gets its turn to end by itself
        tasks = [t for t in self._tasks if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel("stopping")
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=self.stage_timeout_s)
        if pending:
            self._forced = True
            log.error(f"tasks {', '.join(sorted(t.get_name() for t in pending))} did not end when cancelled")

    def _ended(self, task: asyncio.Task[Any], endless: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            if not self.stopping.is_set() and endless:
                self.request_stop(f"task {task.get_name()} was cancelled", RuntimeError(f"{task.get_name()} was cancelled"))
        elif (error := task.exception()) is not None:
            self._failed(task.get_name(), error)
        elif endless and not self.stopping.is_set():
            error = RuntimeError(f"the endless task {task.get_name()} returned")
            log.error(str(error))
            self.request_stop(str(error), error)

    def _failed(self, name: str, error: BaseException) -> None:
        """A task raised. While stopping, what it needed may be gone already: that is no failure of this process."""
        if self.stopping.is_set() and isinstance(error, SlipstreamError):
            log.warning(f"task {name} ended while stopping: {error.message}")
            return
        if isinstance(error, (ConfigError, Fenced)):
            log.error(error.message, task=name)
        else:
            log.exception(f"task {name} failed", error=error)
        self.request_stop(f"task {name} failed: {error}", error)
