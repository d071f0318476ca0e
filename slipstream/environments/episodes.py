"""Episodes of one environment, without a transport: order, idempotence, time limits, failures as values.

consumes: lists of EpisodeReset and EpisodeStep        produces: one Reset, Step or error per item, in order
waits for: the user's `reset` and `step`               unblocked by: their return, or the time limit of the call

Each answer is kept until the episode is closed. So the same sequence number again gives the same answer without acting twice,
also while the first call is still at work (a retry after a time-out joins it). One episode's calls never overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from slipstream import logs
from slipstream.environment import (
    Description,
    Environment,
    Episode,
    EpisodeReset,
    EpisodeStep,
    Observation,
    Reset,
    Step,
    Task,
)
from slipstream.environments.threads import DaemonThreads
from slipstream.errors import ConfigError, Conflict, Exhausted, Fenced, NotFound, OutOfRange, SlipstreamError

THREADS = 16  # plain methods of this many episodes run at once
IDLE_S = 3600.0  # an episode without a call for this long is forgotten
SWEEP_S = 30.0

if TYPE_CHECKING:
    from slipstream.telemetry import EnvironmentMetrics

log = logs.get("environment")
_UNTIMED = contextlib.nullcontext()
_Answer = Reset | Step | SlipstreamError | asyncio.Future[Any]  # a future where user code runs beside, also once it is done


@dataclass(slots=True)
class _Record:
    task: Task
    answers: list[_Answer]  # answers[n] belongs to sequence number n; 0 is the reset
    used: float
    episode: Episode | None = field(default=None)


class Episodes:
    """All episodes of an environment. `clock` is monotonic seconds."""

    def __init__(
        self, environment: Environment, name: str = "", idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.environment = environment
        self.name = name or type(environment).__name__
        self.started, self.failed = 0, 0
        self._idle_s, self._clock, self._swept = idle_s, clock, clock()
        self._records: dict[str, _Record] = {}
        self._over: set[str] = set()  # done or failed, kept for repeats only: they take no room of max_episodes
        self._inline = _inline_methods(environment)
        self._raised = Counter[tuple[str, str, str]]()  # kind, exception and place -> how often
        self._threads = DaemonThreads(THREADS, f"environment-{self.name}")
        self._metrics: EnvironmentMetrics | None = None

    def __len__(self) -> int:
        return len(self._records)

    def measure(self, metrics: EnvironmentMetrics) -> None:
        """Show open episodes, the time of each call of user code and its failures there."""
        self._metrics = metrics
        metrics.episodes.set_function(lambda: len(self._records) - len(self._over))  # as max_episodes counts

    async def start(self) -> Description:
        """Start the environment. Raises ConfigError when it cannot."""
        try:
            pending = self.environment.start()
            if inspect.isawaitable(pending):
                await pending
        except SlipstreamError:
            raise
        except Exception as error:
            raise ConfigError(f"environment {self.name}: start() raised {type(error).__name__}: {error}") from error
        return self.description

    @property
    def description(self) -> Description:
        environment = self.environment
        return Description(self.name, environment.tasks, environment.scorer, environment.max_episodes)

    async def reset(self, items: Sequence[EpisodeReset], timeout_s: float) -> list[Reset | SlipstreamError]:
        """Start episodes. Item errors: OutOfRange, Conflict (id of another task), Exhausted, INTERNAL, DEADLINE_EXCEEDED."""
        self._sweep()
        return await self._gather([(i.episode, self._begin(i)) for i in items], "Reset", timeout_s)

    async def step(self, items: Sequence[EpisodeStep], timeout_s: float) -> list[Step | SlipstreamError]:
        """Answer actions. Item errors: NotFound, Fenced (gap, or the episode is over), INTERNAL, DEADLINE_EXCEEDED."""
        return await self._gather([(i.episode, self._advance(i)) for i in items], "Step", timeout_s)

    def close(self, episodes: Iterable[str]) -> None:
        """Forget episodes; unknown ones are fine."""
        for name in episodes:
            self._over.discard(name)
            if record := self._records.pop(name, None):
                for answer in record.answers:
                    if isinstance(answer, asyncio.Future):
                        answer.cancel()

    def stop(self) -> None:
        """Forget everything. A thread that hangs in user code is left behind, it cannot be stopped."""
        self.close(list(self._records))
        self._threads.stop()

    def _begin(self, item: EpisodeReset) -> _Answer:
        task, environment = item.task, self.environment
        if record := self._records.get(item.episode):
            if record.task != task:
                return Conflict(
                    f"episode {item.episode} runs task {record.task.index} already; choose a new id", "EPISODE_EXISTS")
            record.used = self._clock()
            return record.answers[0]
        if environment.tasks and task.index >= environment.tasks:
            return OutOfRange(
                f"environment {self.name} has {environment.tasks} tasks; index {task.index} is beyond the end", "TASK_INDEX",
                environment=self.name, index=task.index)
        if environment.max_episodes and len(self._records) - len(self._over) >= environment.max_episodes:
            return Exhausted(
                f"environment {self.name} runs max_episodes = {environment.max_episodes} already; close some or serve it again",
                "MAX_EPISODES", 1.0, environment=self.name)
        self.started += 1
        record = self._records[item.episode] = _Record(task, [], self._clock())
        check = partial(self._begun, record, item.episode)
        record.answers.append(self._run(item.episode, "reset", partial(environment.reset, task), check))
        return record.answers[0]

    def _advance(self, item: EpisodeStep) -> _Answer:
        record = self._records.get(item.episode)
        if record is None:
            return NotFound(
                f"environment {self.name} does not know episode {item.episode}: closed, idle too long, or lost in a restart; "
                "start it afresh", "EPISODE_UNKNOWN", episode=item.episode)
        record.used = self._clock()
        if 1 <= item.sequence < len(record.answers):
            return record.answers[item.sequence]
        over = record.answers[-1]
        at_work = isinstance(over, asyncio.Future) and not over.done()
        if item.sequence != len(record.answers) or at_work:
            return Fenced(
                f"episode {item.episode}: sequence {item.sequence} after {len(record.answers) - 1}"
                f"{', which is still at work' if at_work else ''}; send {len(record.answers)} next",
                "SEQUENCE_GAP", episode=item.episode, sequence=item.sequence)
        if isinstance(over, asyncio.Future):
            over = over.result()
        if isinstance(over, SlipstreamError) or (isinstance(over, Step) and over.done):
            return Fenced(
                f"episode {item.episode} is over since sequence {len(record.answers) - 1}; close it", "EPISODE_OVER",
                episode=item.episode)
        episode = record.episode
        assert episode is not None, "the reset has succeeded"
        episode.turn = item.sequence
        call = partial(self.environment.step, episode, item.action)
        record.answers.append(self._run(item.episode, "step", call, partial(self._stepped, item.episode)))
        return record.answers[-1]

    def _run(self, episode: str, kind: str, call: Callable[[], Any], check: Callable[[Any], Any]) -> _Answer:
        """The answer of user code: a value for inline methods, else a task that owns the call."""
        if kind in self._inline:
            with self._timed(kind):
                try:
                    return check(call())
                except Exception as error:
                    return self._failure(episode, kind, error)
        return asyncio.create_task(self._run_beside(episode, kind, call, check), name=f"{kind} {episode}")

    async def _run_beside(self, episode: str, kind: str, call: Callable[[], Any], check: Callable[[Any], Any]) -> Any:
        with self._timed(kind):
            try:
                if inspect.iscoroutinefunction(getattr(self.environment, kind)):
                    return check(await call())
                value = await self._threads.run(call)
                return check(await value if inspect.isawaitable(value) else value)
            except Exception as error:
                return self._failure(episode, kind, error)

    def _timed(self, kind: str) -> contextlib.AbstractContextManager[object]:
        return self._metrics.call_seconds.labels(kind).time() if self._metrics is not None else _UNTIMED

    def _failure(self, episode: str, kind: str, error: Exception) -> SlipstreamError:
        """An exception of user code as a value that names environment, episode and exception."""
        self.failed += 1
        if self._metrics is not None:
            self._metrics.errors.labels(kind).inc()
        if episode in self._records:
            self._over.add(episode)
        where = traceback.extract_tb(error.__traceback__)
        place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
        text = f"{type(error).__name__}: {error}"
        self._raised[kind, type(error).__name__, place] += 1
        times = self._raised[kind, type(error).__name__, place]
        if times == 1:
            log.exception(f"{kind} raised", error=error, quotes=True, environment=self.name, episode=episode)
        elif not times & (times - 1):  # every power of two: a broken environment fails a thousand times a second
            log.warning(
                f"{kind} raised{place} again", failure=logs.Content(text), times=times, environment=self.name, episode=episode)
        return SlipstreamError(
            f"environment {self.name}: {kind} raised {text}{place}", "ENVIRONMENT_ERROR", environment=self.name,
            episode=episode, exception=text)

    def _begun(self, record: _Record, episode: str, value: Any) -> Reset:
        """What `reset` returned, completed: a str is text, an Observation has no answer."""
        if isinstance(value, str):
            value = Observation(text=value)
        if not isinstance(value, Observation):
            raise TypeError(f"reset returned {type(value).__name__}; return a Reset, an Observation or a str")
        reset = value if isinstance(value, Reset) else Reset(value.text, value.messages, value.tokens)
        if not isinstance(reset.answer, str):
            raise TypeError(f"reset returned answer = {reset.answer!r}; a str is needed")
        if not isinstance(reset.scorer, str):
            raise TypeError(f"reset returned scorer = {reset.scorer!r}; a str is needed")
        if reset.info:
            json.dumps(reset.info)
        if not isinstance(reset.state, dict):
            raise TypeError(f"reset returned state = {reset.state!r}; a dict is needed")
        record.episode = Episode(episode, record.task, reset, state=reset.state)
        return reset

    def _stepped(self, episode: str, value: Any) -> Step:
        if not isinstance(value, Step):
            raise TypeError(f"step returned {type(value).__name__}; return a Step")
        if isinstance(value.observation, str):
            value.observation = Observation(text=value.observation)
        if value.reward is not None or value.components:
            numbers = {"reward": 0.0 if value.reward is None else value.reward, **value.components}
            if bad := next((name for name, number in numbers.items() if not math.isfinite(number)), None):
                raise ValueError(f"step returned {bad} = {numbers[bad]}; a finite number is needed")
        if not value.done and value.observation is None:
            raise ValueError("step returned neither an observation nor done = True; the model has nothing to answer")
        if value.done and episode in self._records:
            self._over.add(episode)
        return value

    async def _gather(self, answers: Sequence[tuple[str, _Answer]], kind: str, timeout_s: float) -> list[Any]:
        """Results in order; what is not there in time goes on running and is a DEADLINE_EXCEEDED value now."""
        if pending := [a for _, a in answers if isinstance(a, asyncio.Future) and not a.done()]:
            await asyncio.wait(pending, timeout=timeout_s)
        return [self._result(e, a, kind, timeout_s) if isinstance(a, asyncio.Future) else a for e, a in answers]

    def _result(self, episode: str, answer: asyncio.Future[Any], kind: str, timeout_s: float) -> Any:
        if answer.cancelled():
            return NotFound(f"episode {episode} was closed meanwhile", "EPISODE_UNKNOWN", episode=episode)
        return answer.result() if answer.done() else timed_out(self.name, episode, kind, timeout_s)

    def _sweep(self) -> None:
        """Forget idle episodes, at most every SWEEP_S: callers that died never close theirs."""
        if (now := self._clock()) - self._swept >= min(SWEEP_S, self._idle_s):
            self._swept = now
            self.close([name for name, record in self._records.items() if now - record.used > self._idle_s])


def _inline_methods(environment: Environment) -> set[str]:
    """Methods that are called without a thread: those of an `inline` class, and the default step."""
    plain = {kind for kind in ("reset", "step") if not inspect.iscoroutinefunction(getattr(environment, kind))}
    return plain if environment.inline else plain & {"step"} if type(environment).step is Environment.step else set()


def timed_out(environment: str, episode: str, kind: str, timeout_s: float) -> SlipstreamError:
    """The value of an item whose user code did not return in time."""
    error = SlipstreamError(
        f"environment {environment}: {kind} of episode {episode} took over {timeout_s:.3g} s (environments.step_timeout_s)",
        "TIMEOUT", environment=environment, episode=episode)
    error.code = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    return error
