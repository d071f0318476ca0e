"""Hops 1 and 2 of the walk: lease samples, play their episodes, submit them.

consumes: leases (buffer, LeaseSamples, a long poll)    produces: samples (buffer, SubmitSamples or StreamSamples), partials
waits for: work; free slots; the version that a lease asks for; the buffer when it is away
unblocked by: a grant; a finished sample; a swap; the buffer's return

A lease starts once its version is there: `min_step` is loaded or exceeded, or, pinned, exactly that version is loaded. Finished
samples are kept until the buffer has acknowledged them; all that finished during one submit go into the next. When the process
dies its leases lapse and others take over; a lease lost to another is told by a heartbeat, and its work dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from google.rpc import code_pb2

from services.rollout.engine import Engine
from services.rollout.evidence import Evidence
from services.rollout.player import Key, Player, key_of
from services.rollout.weights import Weights
from slipstream import logs, rpc, sample_stream, tracing
from slipstream.environments.client import EnvironmentClient
from slipstream.errors import InvalidInput, SlipstreamError, Unavailable, from_status
from slipstream.lifecycle import FINISH, STOP_INTAKE
from slipstream.protos.buffer.v1 import samples_pb2 as pb
from slipstream.protos.buffer.v1.samples_pb2_grpc import SampleServiceStub
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.protos.types.v1.sample_pb2 import Lease
from slipstream.sample import crc32c
from slipstream.service import ServiceContext, long_lived
from slipstream.telemetry import RolloutMetrics

POLL_S = 10.0
CALL_S = 30.0
IDLE_S = 5.0  # between polls once the run has no more work
DRAIN_S = 10.0  # time to finish what is in flight at a stop
FAILURES_IN_A_ROW = 64  # from here on the worker takes its time, up to MOST_PAUSE_S between two leases
MOST_PAUSE_S = 10.0
SUBMIT_BYTES = 16 << 20  # of what is handed in at once
STREAM_BYTES = 1 << 20  # from here on over a stream
# Each call costs every service on the way a fixed price, so finished samples gather for this long, or until this share of the
# slots is done, or until nothing is in flight that they could wait for.
GATHER_S = 0.2
GATHER_SHARE = 2
# For the same reason, and because few new sequences cost the engine a pass as dear as that of many, a lease is asked for once
# this share of the slots is free; the rest of the rule is the same.
ROOM_SHARE = 8

log = logs.get("rollout")


class RolloutWorker:
    """The loops of one rollout process."""

    def __init__(
        self, context: ServiceContext, engine: Engine, environments: Mapping[str, EnvironmentClient], metrics: RolloutMetrics,
    ) -> None:
        self._context, self._engine, self._metrics = context, engine, metrics
        self._buffer = SampleServiceStub(context.channel)
        self._slots = context.run.rollout.slots  # at most; `bound` lowers it
        self._pinned = context.run.schedule.pinned
        self._leases: dict[Key, Lease] = {}  # every lease that is ours, until acknowledged or lost
        self._held: list[pb.SampleLease] = []  # wait for their version
        self._done: list[tuple[Key, pb.SubmittedSample]] = []  # finished, not yet acknowledged
        self._submitting, self._streams = 0, True
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._idle, self._quiet = asyncio.Event(), asyncio.Event()
        self._player = Player(context, engine, environments, metrics, self._finished, self._advance)
        self.weights = Weights(context, engine, metrics, self._before_swap, self._swapped)
        self._submits = tracing.OpenSpans(context.tracer, "submit")  # of what is in `_done` or on its way
        self._intake: asyncio.Task[None] | None = None
        self._finished_count = 0
        self._evidence = Evidence(context.run.folder, context.arguments.instance) if context.run.service.audit else None
        metrics.slots.set(self._slots)
        self._note()

    def start(self) -> None:
        """Spawn the loops, and their end in stages."""
        lifecycle = self._context.lifecycle
        self.weights.start()
        self._intake = lifecycle.spawn("lease", self._lease(), endless=False)
        lifecycle.spawn("submit", self._submit())
        lifecycle.spawn("heartbeat", self._heartbeat())
        lifecycle.on_stop(STOP_INTAKE, self._stop_intake, "lease")
        lifecycle.on_stop(FINISH, lambda: self.drain(DRAIN_S), "samples in flight")

    def bound(self, slots: int) -> None:
        """Hold at most this many samples from here on; those in hand stay."""
        if slots != self._slots:
            self._slots = slots
            self._metrics.slots.set(slots)
            self._note()

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Take no more leases; finish what is in flight within `grace_s`, hand the rest back: (finished, handed back)."""
        await self._stop_intake()
        before, back = self._finished_count, [(key_of(lease.lease), b"") for lease in self._held]
        self._held.clear()
        self._note()
        try:
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        except TimeoutError:
            log.info("handing back what is in flight", samples=len(self._player.running))
        back += await self._player.hand_back()  # also what a failed engine left behind
        await self._give_back(back)
        self._note()
        await self._quiet.wait()
        return self._finished_count - before, len(back)

    # leases

    async def _lease(self) -> None:
        context, run_hash = self._context, self._context.run.hash  # each look at it serialises the settings anew
        sentence = "work from the buffer"
        with context.waits.on("first policy version from the trainer", patient=True):
            while self._engine.version is None:
                await self._room.wait()
                self._room.clear()
        long_lived()  # torch and transformers: walking them again and again was a third of this thread's time in the demo
        self._note()
        while True:
            busy = self.in_hand >= self._slots
            full = f"free slots: {self.in_hand} samples in flight"
            with context.waits.on(full, patient=True) if busy else nullcontext():
                await self._room.wait()
            await self._room_gathers()
            await self._spare_a_broken_environment()
            version = self._engine.version
            request = pb.LeaseSamplesRequest(
                worker=context.arguments.instance, max_samples=max(1, self._slots - self.in_hand), wait=rpc.duration(POLL_S),
                loaded_version=version.number if version else 0, run_file_hash=run_hash)
            response = await rpc.call_until(
                self._buffer.LeaseSamples, request, POLL_S + CALL_S, context.waits, sentence, context.clock)
            self.weights.note(response.newest_version)
            sentence = response.waiting_for or "work from the buffer"
            if response.leases:
                self._take(response.leases)
            elif response.finished:
                with context.waits.on("nothing: every batch of the run has its samples"):
                    await context.clock.sleep(IDLE_S)

    async def _spare_a_broken_environment(self) -> None:
        """Where every episode fails, asking for more at full speed only burns tasks and fills logs."""
        player = self._player
        if player.failures >= FAILURES_IN_A_ROW:
            pause_s = min(MOST_PAUSE_S, 0.1 * player.failures / FAILURES_IN_A_ROW)
            sentence = f"a pause: {player.failures} episodes in a row failed, the last with: {player.failure}"
            with self._context.waits.on(sentence):
                await self._context.clock.sleep(pause_s)

    def _take(self, leases: Sequence[pb.SampleLease]) -> None:
        for lease in leases:
            self._leases[key_of(lease.lease)] = lease.lease
        self._held += leases
        self._advance()

    def _advance(self) -> None:
        """Start what may start; when pinned, ask for the version of what may not."""
        ready: list[pb.SampleLease] = []
        held: list[pb.SampleLease] = []
        version = None if self._pinned and self.weights.swapping else self._engine.version
        for lease in self._held:  # one question for all: the engine's thread may change the answer between two
            (ready if version is not None and self._ready(lease, version) else held).append(lease)
        self._held = held
        if ready:
            self._player.play(ready)
        if self._pinned and self._held:
            self.weights.want(min((lease.pinned_version for lease in self._held), key=lambda v: v.number))
        self._note()

    @staticmethod
    def _ready(lease: pb.SampleLease, version: PolicyVersion) -> bool:
        if lease.HasField("pinned_version"):
            return version.number == lease.pinned_version.number
        return version.step >= lease.min_step

    async def _before_swap(self) -> None:
        """Pinned: a sample is generated wholly by one version, so the swap waits for those in flight."""
        if self._pinned and self._player.running:
            before = f"swap: {len(self._player.running)} samples of the loaded version in flight"
            with self._context.waits.on(before, patient=True):
                while self._player.running:
                    await self._idle.wait()

    def _swapped(self) -> None:
        if (version := self._engine.version) is not None:
            self._player.spans.event(None, "swap", version=version.number, step=version.step)
        self._advance()

    # results

    def _finished(self, key: Key, submission: pb.SubmittedSample) -> None:
        if key in self._leases:
            self._submits.begin((submission.lease,), bytes=len(submission.body))
            self._done.append((key, submission))
            self._news.set()

    async def _submit(self) -> None:
        context = self._context
        while True:
            await self._news.wait()
            await self._gather()
            lot = self._next_lot()
            if not lot:
                self._news.clear()
                self._note()
                continue
            results = await self._hand_in([submission for _, submission in lot])
            pause_s, outcomes = 0.0, Counter[str]()
            for (key, submission), result in zip(lot, results, strict=True):
                outcome, again_s = self._acknowledged(key, submission, result)
                outcomes[outcome] += outcome not in ("deferred", "malformed")  # these come again
                pause_s = max(pause_s, again_s)
            self._submitting = 0
            for outcome, count in outcomes.items():
                self._metrics.episodes.labels(outcome).inc(count)
            self._note()
            if pause_s:
                with context.waits.on("buffer: room for samples"):
                    await context.clock.sleep(pause_s)

    async def _hand_in(self, lot: Sequence[pb.SubmittedSample]) -> Sequence[pb.SubmitResult]:
        """A result for each: few bytes in one call, many over a stream. A buffer of a former release has no streams."""
        context, what = self._context, f"buffer: {len(lot)} samples"
        if self._streams and sum(s.ByteSize() for s in lot) > STREAM_BYTES:
            try:
                return await sample_stream.submit_until(
                    sample_stream.method(context.channel), context.arguments.instance, [sample_stream.apart(s) for s in lot],
                    CALL_S, context.waits, what, context.clock)
            except SlipstreamError as error:
                if error.code != code_pb2.UNIMPLEMENTED:
                    raise
                self._streams = False
        request = pb.SubmitSamplesRequest(worker=context.arguments.instance, samples=lot)
        response = await rpc.call_until(self._buffer.SubmitSamples, request, CALL_S, context.waits, what, context.clock)
        return response.results

    async def _gather(self) -> None:
        """Wait for company; see GATHER_S. What is last in flight never waits."""
        await self._gathered(self._news, lambda: not self._done or len(self._done) * GATHER_SHARE >= self._slots)

    async def _room_gathers(self) -> None:
        """The same for slots; see ROOM_SHARE."""
        await self._gathered(self._room, lambda: (self._slots - self.in_hand) * ROOM_SHARE >= self._slots)

    async def _gathered(self, news: asyncio.Event, enough: Callable[[], bool]) -> None:
        """For at most GATHER_S, while something is in flight and there is not `enough`; `news` tells that there is more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GATHER_S
        while self._player.running and not enough():
            news.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                break
        news.set()

    def _next_lot(self) -> list[tuple[Key, pb.SubmittedSample]]:
        """As much as one call takes."""
        size, count = 0, 0
        for _, submission in self._done:
            size += submission.ByteSize()
            if count and size > SUBMIT_BYTES:
                break
            count += 1
        lot, self._done = self._done[:count], self._done[count:]
        self._submitting = len(lot)
        return lot

    def _acknowledged(self, key: Key, submission: pb.SubmittedSample, result: pb.SubmitResult) -> tuple[str, float]:
        """Settle one item: (outcome, seconds to wait before the next try when it has to be sent again)."""
        error = from_status(result.status) if result.status.code else None
        if isinstance(error, Unavailable):
            self._done.append((key, submission))
            self._news.set()
            self._submits.event((key,), "deferred")
            return "deferred", error.retry_s or 0.5
        if isinstance(error, InvalidInput) and not submission.failure:
            self._refused(key, error)
            return "malformed", 0.0
        self._leases.pop(key, None)
        self._finished_count += 1
        outcome = "refused" if error else "failed" if submission.failure else "submitted"
        if not error and result.outcome == pb.OUTCOME_OUTDATED:
            outcome = "outdated"
        if error:
            log.warning("sample refused", reason=error.reason, error=error.message, draw=key[1], sample=key[2], attempt=key[3])
        self._submits.end(key, outcome)
        if self._evidence and outcome in ("submitted", "failed"):
            self._evidence.accepted(submission)
        return outcome, 0.0

    def _refused(self, key: Key, error: SlipstreamError) -> None:
        """The buffer will never take this body: close the sample with the reason instead of letting its lease lapse."""
        log.error("sample is malformed", reason=error.reason, error=error.message, draw=key[1], sample=key[2])
        if key in self._leases:
            self._done.append((key, pb.SubmittedSample(lease=self._leases[key], failure=f"malformed: {error.reason}")))
            self._news.set()

    # leases, kept and given back

    async def _heartbeat(self) -> None:
        context = self._context
        while True:
            await context.clock.sleep(context.run.rollout.heartbeat_s)
            keys = list(self._leases)
            if not keys or context.stuck:  # what does not get on here is better given to others
                continue
            request = pb.HeartbeatSamplesRequest(
                worker=context.arguments.instance, leases=[self._leases[key] for key in keys])
            response = await rpc.call_until(
                self._buffer.HeartbeatSamples, request, CALL_S, context.waits, "buffer: heartbeat of leases", context.clock)
            lost = [key for key, status in zip(keys, response.statuses, strict=True) if from_status(status)]
            self._lose(lost)

    def _lose(self, keys: Sequence[Key]) -> None:
        """Others have these by now, or their groups are closed."""
        gone = {key for key in keys if self._leases.pop(key, None)}
        if gone:
            log.info("leases lost", count=len(gone), draws=sorted({key[1] for key in gone})[:20])
            self._held = [lease for lease in self._held if key_of(lease.lease) not in gone]
            self._done = [item for item in self._done if item[0] not in gone]
            self._player.abort(sorted(gone))
            for key in gone:
                self._submits.end(key, "lost")
            self._advance()

    async def _give_back(self, samples: Sequence[tuple[Key, bytes]]) -> None:
        """Partials first, then plain leases; what cannot be given back lapses."""
        context = self._context
        partials = [pb.PartialSample(lease=self._leases[k], body=b, crc32c=crc32c(b), release=True)
                    for k, b in samples if b and k in self._leases]
        leases = [self._leases[k] for k, b in samples if not b and k in self._leases]
        worker = context.arguments.instance
        try:
            if partials:
                await rpc.call(self._buffer.SubmitPartials, pb.SubmitPartialsRequest(worker=worker, partials=partials), CALL_S)
            if leases:
                await rpc.call(self._buffer.ReleaseSamples, pb.ReleaseSamplesRequest(worker=worker, leases=leases), CALL_S)
        except SlipstreamError as error:
            log.warning("leases not given back, they lapse", count=len(samples), error=error.message)
        for key, _ in samples:
            self._leases.pop(key, None)
        if samples:
            self._metrics.episodes.labels("handed_back").inc(len(samples))

    async def _stop_intake(self) -> None:
        if self._intake is not None and not self._intake.done():
            self._intake.cancel("stopping")
            await asyncio.wait([self._intake])

    @property
    def in_hand(self) -> int:
        """Samples that hold a slot, or wait for one."""
        return len(self._held) + len(self._player.running)

    def _note(self) -> None:
        """Set the events that follow from what is in hand."""
        states = (
            (self._room, self.in_hand < self._slots),
            (self._idle, not self._player.running),
            (self._quiet, not (self.in_hand or self._done or self._submitting)),
        )
        for event, state in states:
            event.set() if state else event.clear()
