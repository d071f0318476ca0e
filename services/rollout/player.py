"""Hop 2 of the walk: episodes in flight, between environments and the engine.

consumes: leases that may start    produces: finished samples, through `finished`
waits for: environments (Reset, Step), the engine    unblocked by: their answers, their time limits; an abort

What belongs together travels together: the leases of one grant are reset in one call per environment and prompted in one call
of the engine, the answers that one decode step ends are stepped in one call. No task and no future per sample: a sample of the
demo takes a third of a millisecond in all, decoding included.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.rollout.codec import Codec
from services.rollout.engine import Engine, Generation, Request
from services.rollout.episode import Episode
from slipstream import logs, tracing
from slipstream.config import RunFile
from slipstream.environment import EpisodeReset, EpisodeStep, Observation, Reset, Step, Task
from slipstream.environments.client import EnvironmentClient
from slipstream.errors import InvalidInput, NotFound, SlipstreamError, Unavailable
from slipstream.protos.buffer.v1.samples_pb2 import SampleLease, SubmittedSample
from slipstream.protos.types.v1.sample_pb2 import Lease, Routes
from slipstream.protos.types.v1.tensor_pb2 import ObjectRef
from slipstream.sample import FINISH_ABORT, crc32c, tensor
from slipstream.service import ServiceContext
from slipstream.telemetry import RolloutMetrics

INLINE_ROUTES_BYTES = 64 << 10  # larger routes go to the object store
RETRY_S = 0.5
LOGGED_FAILURES = 16  # in a row, each with its line; then every power of two
RESTARTS = 3  # times an episode that its environment forgot is begun afresh

log = logs.get("rollout")
Key = tuple[int, int, int, int]  # ledger epoch, draw, sample, attempt


def key_of(lease: Lease) -> Key:
    draw = lease.sample.draw
    return draw.ledger_epoch, draw.number, lease.sample.index, lease.attempt


@dataclass(slots=True, eq=False)
class Running:
    """One sample in flight."""

    key: Key
    lease: SampleLease
    task: Task
    episode: Episode
    name: str  # of the episode at its environment: unique per attempt
    restarts: int = 0
    request: Request | None = None  # while the engine has it, or will
    action: EpisodeStep | None = None  # while the environment has it
    gone: bool = False  # fenced or handed back: whatever still comes is ignored

    @property
    def environment(self) -> str:
        return self.task.environment


class Player:
    """Plays episodes. `finished(key, submission)` is called once for each that was not aborted, `settled()` after each lot."""

    def __init__(
        self, context: ServiceContext, engine: Engine, environments: Mapping[str, EnvironmentClient], metrics: RolloutMetrics,
        finished: Callable[[Key, SubmittedSample], None], settled: Callable[[], None],
    ) -> None:
        self._context, self._engine, self._environments, self._metrics = context, engine, environments, metrics
        self._finished, self._settled = finished, settled
        self._run: RunFile = context.run
        self._turns = {e.name: e.max_turns for e in context.run.environments}
        self._due: list[Running] = []  # model calls that go to the engine at the end of this turn
        self._asked: dict[int, Running] = {}  # by request, while the engine has it
        self._answered = asyncio.Event()
        self._handed_back: list[tuple[Key, bytes]] = []
        self._tasks = 0
        self.failures = 0  # episodes that failed since the last one that did not
        self.failure = ""  # the last reason
        self.running: dict[Key, Running] = {}
        self.spans = tracing.OpenSpans(context.tracer, "generation")  # one for each in `running` that is traced

    @functools.cached_property
    def codec(self) -> Codec:
        """Of the model that the engine runs; after its start."""
        return Codec(self._engine.tokenizer, self._engine.stop_token_ids)

    def play(self, leases: Sequence[SampleLease]) -> None:
        """Begin episodes: one Reset call per environment."""
        lots: dict[str, list[Running]] = {}
        tasks: dict[tuple[int, int], Task] = {}  # of a draw
        rollout, codec = self._run.rollout, self.codec
        for lease in leases:
            key = key_of(lease.lease)
            if (task := tasks.get(key[:2])) is None:
                task = tasks[key[:2]] = Task(lease.task.index, lease.task.seed, lease.task.environment)
            episode = Episode(lease, codec, rollout.max_new_tokens, rollout.context, rollout.capture_routes)
            self.running[key] = running = Running(key, lease, task, episode, "{}-{}-{}-{}".format(*key))
            lots.setdefault(task.environment, []).append(running)
        self.spans.begin((lease.lease for lease in leases), worker=self._context.arguments.instance)
        for environment, lot in lots.items():
            self._spawn("reset", environment, self._reset(environment, lot))

    def abort(self, keys: Sequence[Key]) -> None:
        """Forget samples that others have by now."""
        for key in keys:
            if running := self.running.pop(key, None):
                running.gone = True
                self.spans.end(key, "lost")
                if running.request is not None:
                    self._engine.abort([running.request.id])

    async def hand_back(self) -> list[tuple[Key, bytes]]:
        """Stop everything in flight: (key, body of the partial or b"") of each sample, none of which will be `finished`."""
        self._due.clear()
        while self._asked:
            self._engine.abort(self._asked)
            self._answered.clear()
            await self._answered.wait()
        for running in list(self.running.values()):
            self._give_back(running, b"")
        back, self._handed_back = self._handed_back, []
        return back

    def _give_back(self, running: Running, partial: bytes) -> None:
        running.gone = True
        self.running.pop(running.key, None)
        self.spans.end(running.key, "handed back")
        self._handed_back.append((running.key, partial))

    def _spawn(self, what: str, environment: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks += 1
        self._context.lifecycle.spawn(f"{what} {environment} {self._tasks}", work, endless=False)

    # environment

    async def _reset(self, environment: str, lot: list[Running]) -> None:
        """First observations, then the first model calls."""
        client = self._environments.get(environment)
        if client is None:
            for running in lot:
                self._fail(running, f"environment {environment!r} is not in the run file of this worker")
            self._settled()
            return
        for retry in range(1 << 30):
            lot = [r for r in lot if not r.gone]
            items = [EpisodeReset(r.name, r.task) for r in lot]
            with self._calling("reset", environment, lot):
                results = await client.reset(items)
            lot = [r for r, result in zip(lot, results, strict=True) if not self._started(r, result)]
            self._generate()
            self._settled()
            if not lot:
                return
            await self._pause(environment, lot, retry)

    def _started(self, running: Running, result: Reset | SlipstreamError) -> bool:
        """Whether that was an answer; False = ask again."""
        if running.gone:
            return True
        if isinstance(result, Unavailable):
            return False
        if isinstance(result, SlipstreamError):
            self._fail(running, result.message)
            return True
        try:
            running.episode.begin(result)
            self._ask(running)
        except InvalidInput as error:
            self._fail(running, error.message)
        return True

    async def _step(self, environment: str, lot: list[Running]) -> None:
        """Answers to actions: the next observation, or the end."""
        client = self._environments[environment]
        ended: list[str] = []
        for retry in range(1 << 30):
            lot = [r for r in lot if not r.gone and r.action is not None]
            with self._calling("step", environment, lot):
                results = await client.step([r.action for r in lot if r.action is not None])
            again = []
            for running, result in zip(lot, results, strict=True):
                if isinstance(result, Unavailable):
                    again.append(running)
                elif await self._stepped(running, result):
                    ended.append(running.name)
            lot = again
            self._generate()
            self._settled()
            if not lot:
                break
            await self._pause(environment, lot, retry)
        if ended:
            await client.close(ended)

    async def _stepped(self, running: Running, result: Step | SlipstreamError) -> bool:
        """Whether the episode is over at its environment."""
        running.action = None
        if running.gone:
            return True
        if isinstance(result, NotFound) and running.restarts < RESTARTS:
            self._restart(running)
            return False
        if isinstance(result, SlipstreamError):
            self._fail(running, result.message)
            return True
        running.episode.stepped(result)
        if result.done or running.episode.turn >= self._turns[running.environment]:
            await self._end(running)
            return True
        try:
            observation = result.observation or ""
            running.episode.observe(Observation(text=observation) if isinstance(observation, str) else observation)
            self._ask(running)
        except InvalidInput as error:
            if error.reason != "PROMPT_TOO_LONG":
                self._fail(running, error.message)
            else:
                await self._end(running)
            return True
        return False

    @contextlib.contextmanager
    def _calling(self, what: str, environment: str, lot: Sequence[Running]) -> Iterator[None]:
        keys = [running.key for running in lot]
        self.spans.event(keys, f"environment {what}")
        with (
            self._context.waits.on(f"environment {environment}: {what} of {len(lot)} episodes"),
            self._metrics.environment_seconds.labels(what).time(), tracing.on_behalf(self.spans.parent(keys)),
        ):
            yield
        self.spans.event(keys, f"environment {what} answered")

    def _restart(self, running: Running) -> None:
        """The environment has forgotten the episode (it was restarted): begin afresh under a new id."""
        running.restarts += 1
        running.name = "{}-{}-{}-{}-{}".format(*running.key, running.restarts)
        old = running.episode
        running.episode = Episode(running.lease, old.codec, old.max_new_tokens, old.context, old.routes)
        self._spawn("reset", running.environment, self._reset(running.environment, [running]))

    async def _pause(self, environment: str, lot: Sequence[Running], retry: int) -> None:
        with self._context.waits.on(f"environment {environment}: {len(lot)} episodes, unavailable"):
            await self._context.clock.sleep(min(RETRY_S * 2 ** min(retry, 4), 8.0))

    # engine

    def _ask(self, running: Running) -> None:
        """The next model call of an episode. Raises InvalidInput."""
        request = running.episode.request()
        self._engine.check(request)
        running.request = request
        self._due.append(running)

    def _generate(self) -> None:
        """Hand over the model calls that are due, all at once."""
        due, self._due = self._due, []
        requests = [r.request for r in due if r.request is not None and not r.gone]
        if requests:
            self._engine.submit(requests, self._answer)
            self._asked.update((r.request.id, r) for r in due if r.request is not None and not r.gone)

    def _answer(self, answers: list[tuple[Request, Generation | SlipstreamError]]) -> None:
        """All answers that one decode step ended."""
        taken: list[tuple[Running, list[int]]] = []
        self._answered.set()
        for request, generation in answers:
            running = self._asked.pop(request.id)
            running.request = None
            if running.gone:
                continue
            if isinstance(generation, SlipstreamError):  # the engine's fault, not the task's: another worker gets the lease
                self._give_back(running, b"")
                self._context.lifecycle.request_stop(generation.message, generation)
                continue
            if generation.finish_reason == FINISH_ABORT:
                deterministic = self._run.deterministic  # a resumed answer would come from other shapes, so other bits
                self._give_back(running, b"" if deterministic else running.episode.partial(generation))
                continue
            taken.append((running, running.episode.take(generation)))
        lots: dict[str, list[Running]] = {}
        for (running, answer), text in zip(taken, self.codec.decode_all([answer for _, answer in taken]), strict=True):
            action = running.episode.said(answer, text)
            self.spans.event((running.key,), "turn", turn=running.episode.turn, tokens=len(answer))
            running.action = EpisodeStep(running.name, running.episode.turn, action)
            lots.setdefault(running.environment, []).append(running)
        for environment, lot in lots.items():
            self._spawn("step", environment, self._step(environment, lot))

    # end

    async def _end(self, running: Running) -> None:
        try:
            if running.episode.routes:
                await self._store_routes(running)
            submission = running.episode.submission()
        except InvalidInput as error:
            self._fail(running, error.message)
            return
        if self.running.pop(running.key, None):
            running.gone = True
            self.failures = 0
            self.spans.end(running.key, "finished", turns=running.episode.turn, tokens=submission.generated_tokens)
            self._finished(running.key, submission)

    def _fail(self, running: Running, reason: str) -> None:
        """An environment's failure is data: the sample is closed with it."""
        if not running.gone and self.running.pop(running.key, None):
            running.gone = True
            self.failures, self.failure = self.failures + 1, reason
            self.spans.end(running.key, "failed", turns=running.episode.turn)
            if self.failures <= LOGGED_FAILURES or not self.failures & (self.failures - 1):
                log.warning(
                    "episode failed", failure=logs.Content(reason), draw=running.key[1], sample=running.key[2],
                    task=running.task.index,
                    failed_in_a_row=self.failures)
            self._finished(running.key, SubmittedSample(lease=running.lease.lease, failure=reason[:500]))

    async def _store_routes(self, running: Running) -> None:
        """Large routes do not travel with the sample."""
        for i, segment in enumerate(running.episode.segments):
            if segment.routes is None or segment.routes.nbytes <= INLINE_ROUTES_BYTES:
                continue
            wire = tensor(segment.routes)
            name = f"routes/{'-'.join(map(str, running.key))}-{i}"
            await self._context.store.put(name, wire.data)
            segment.routes_ref = Routes(
                dtype=wire.dtype, shape=wire.shape, object=ObjectRef(key=name, size=len(wire.data), crc32c=crc32c(wire.data)))
            segment.routes = None
