"""The trainer's loop: hops 4, 5 and 6 of the walk.

    lease batch k ─► read bodies ─► rows ─► log-probabilities ─► loss ─► AdamW ─► publish ─► every n steps: checkpoint ─► commit
    └─ prefetched while k-1 trains ────┘                          (beside step k+1) ◄┘                   (beside it, too)

Consumes     numbered batches (buffer), the checkpoint in force (object store), RequestCheckpoint.
Produces     policy versions and checkpoints (object store), version events and commits (buffer), metrics and audit lines (run
             folder), at the end a Hugging Face model (run folder).
Waits for    batch k; one publication and one checkpoint in flight before it starts the next of the same kind.
Unblocked by workers finishing batch k's samples, which may need what this loop publishes and commits: so a wait for a batch
             never holds back a publication, and a request for a checkpoint is served in the middle of it. Or by a stop.

Every start is a resume: build the model → read the checkpoint in force → take an incarnation above its own → write that into
the pointer (from here on a predecessor is fenced) → load, or warm up → publish → lease. All torch work is done by one thread;
the event loop stays free.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.trainer import final_model
from services.trainer.alarms import Alarms
from services.trainer.batches import BatchReader, TrainingBatch
from services.trainer.check import positions_suffice, prove_forward
from services.trainer.checkpoint import Checkpoints, Header
from services.trainer.learner import Learner, Metrics, Snapshot
from services.trainer.nonfinite import SkipRecord
from services.trainer.packing import Row
from services.trainer.parallel import launch
from services.trainer.publish import Publisher
from services.trainer.records import Records
from services.trainer.reference import start_reference
from services.trainer.spans import StepSpans
from services.trainer.turns import Turns
from services.trainer.warmup import warm_up
from slipstream import logs, rpc, telemetry
from slipstream.errors import Conflict, SlipstreamError
from slipstream.lifecycle import FINISH, STOP_INTAKE
from slipstream.manifest import RawTensor
from slipstream.probes import Probes
from slipstream.protos.buffer.v1 import batches_pb2, batches_pb2_grpc
from slipstream.service import ServiceContext, long_lived

RPC_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 600.0
STOP_S = 20.0  # a stop waits this long for the last checkpoint's commit; the next start commits it again anyway
WINDOW = 10  # steps whose mean reward is compared with run.target_reward

T = TypeVar("T")
Published = tuple[list[RawTensor], Probes | None]
Prefetched = tuple[TrainingBatch, list[Row] | None]  # see Learner.prepared

log = logs.get("trainer")


class TrainerLoop:
    """One trainer start. `run()` returns when the run is finished or the process is asked to stop."""

    def __init__(self, context: ServiceContext) -> None:
        self.context, self.settings = context, context.run
        self.waits, self.clock, self.stopping = context.waits, context.clock, context.lifecycle.stopping
        self.telemetry = telemetry.TrainerMetrics(context.registry)
        self.step = 0  # the last one applied
        self.checkpoint_step = self.incarnation = 0
        self.last: Metrics = {}
        self.checkpoints = Checkpoints(context.store, self.settings.run.name, self.settings.trainer.keep_checkpoints)
        self.records = Records(self.settings.folder)
        self.alarms = Alarms(self.settings.alarms, lambda name, on: self.telemetry.alarm.labels(name).set(on))
        self.spans = StepSpans(context.tracer)
        self.skips = SkipRecord(self.settings.folder, self.settings.trainer.nonfinite_limit)
        self.learner: Learner
        self.publisher: Publisher
        self._batches: Any = batches_pb2_grpc.BatchServiceStub(context.channel)
        self._reader = BatchReader(
            self._batches, self.clock, self.waits, self.request_checkpoint,
            context.store if self.settings.algorithm.replays_sampler and self.settings.trainer.parallel.ranks == 1 else None,
            self.settings.algorithm.credit)
        self._torch, self._auditing = ThreadPoolExecutor(1, "torch"), ThreadPoolExecutor(1, "audit")
        self._turns = Turns(context, self._in_torch)
        self._wake, self._wanted, self._training = asyncio.Event(), False, False
        self._prefetched: asyncio.Task[Prefetched | None] | None = None
        self._checkpointing: asyncio.Task[None] | None = None
        self._submitted = (-1, -1)  # steps of the last publication and the last checkpoint begun
        self._ledger_epoch = self._ledger_sequence = 0
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._ended = self.clock.monotonic()
        self._started = False
        self._works = 0  # pieces of torch work done: forward passes and whole calls
        context.judge_progress(lambda: (self._works, context.policy_version, self.checkpoint_step), self._in_hand)

    @property
    def done(self) -> bool:
        """Whether all steps are trained, or the target is reached."""
        target = self.settings.run.target_reward
        reached = target is not None and len(self._rewards) == WINDOW and statistics.fmean(self._rewards) >= target
        return reached or self.step >= self.settings.run.steps

    def _in_hand(self) -> str:
        """What is awaited of this process now; waiting for a batch is not, others work on that."""
        if not self._started:
            return "the trainer's start: model, warm-up, first version"
        return f"optimizer step {self.step + 1}" if self._training else ""

    def request_checkpoint(self) -> int:
        """Write a checkpoint after the step that is being trained; at once when none is. Returns the step it will cover."""
        self._wanted = True
        self._wake.set()
        return self.step + self._training

    async def run(self) -> None:
        """From start to end. Raises Fenced when a newer trainer has taken over."""
        running = asyncio.current_task()
        assert running is not None
        self.context.lifecycle.on_stop(STOP_INTAKE, self._woken, "trainer loop")
        self.context.lifecycle.on_stop(FINISH, lambda: asyncio.wait({running}), "trainer loop")
        try:
            if not await self._unless_stopped(self._start()):
                return
            while not self.done and (prefetched := await self._next_batch()) is not None:
                await self._train(*prefetched)
            await self._end()
            await self._in_torch(launch.close, self.learner)
        finally:
            if self._prefetched is not None:
                self._prefetched.cancel()
            for threads in (self._torch, self._auditing):
                threads.shutdown(wait=False, cancel_futures=True)
            self.records.close()

    async def _start(self) -> None:
        if not await self._turns.take():
            return
        with self.waits.on("the model to be loaded"):
            self.learner = await self._in_torch(launch.learner_of, self.settings)
            await self._in_torch(self._prove)
        self.checkpoints = launch.checkpoints_of(self.checkpoints, self.learner, self.context.store, self.settings)
        loaded = await self._take_over()
        if loaded is None:
            await warm_up(
                self.learner, self.settings, self.waits, self._in_torch, self.stopping, self.context.credentials)
        else:
            header, snapshot = loaded
            await self._in_torch(self.learner.load, snapshot)
            self.step = self.checkpoint_step = header.step
            self._rewards.extend(header.notes.get("rewards", []))
            self.skips.in_a_row = header.notes.get("skipped_in_a_row", 0)
            self._submitted = (-1, header.step)
            await self._commit(header)  # a predecessor may have died before it could
        await start_reference(self.learner, self.checkpoints, self._in_torch)
        self.alarms.resume(self.records.resume(self.step))
        self.publisher = Publisher(
            self.context, self.incarnation, await self._in_torch(self.learner.files), self._published,
            self.records.version, self.learner.base())
        await self._publish(await self._in_torch(self._weights))
        await self._turns.give(self.learner)
        await self._checkpoint()  # step 0 is one, too: a restart does not warm up again
        self._show()
        self._started = True
        long_lived()
        log.info("trainer starts", step=self.step, incarnation=self.incarnation, resumed=loaded is not None)

    async def _take_over(self) -> tuple[Header, Snapshot] | None:
        """The checkpoint in force, with every earlier trainer fenced. Again when the pointer moved meanwhile."""
        while True:
            pointer = await self.checkpoints.open()
            with self.waits.on("the checkpoint to be read"):
                loaded = await self.checkpoints.load()
            reply: batches_pb2.TakeIncarnationResponse = await rpc.call_until(
                self._batches.TakeIncarnation, batches_pb2.TakeIncarnationRequest(
                    above=pointer.incarnation, checkpoint_batch=loaded[0].step if loaded else 0,
                    checkpoint_epoch=loaded[0].ledger_epoch if loaded else 0,
                    checkpoint_sequence=loaded[0].ledger_sequence if loaded else 0),
                RPC_TIMEOUT_S, self.waits, "an incarnation from the buffer", self.clock)
            self.incarnation, self._ledger_epoch = reply.incarnation, reply.ledger_epoch
            self._ledger_sequence = reply.ledger_sequence
            try:
                await self.checkpoints.take_over(self.incarnation)
                return loaded
            except Conflict:
                log.warning("the checkpoint pointer moved while taking over; reading it again", incarnation=self.incarnation)

    async def _next_batch(self) -> Prefetched | None:
        """Batch step + 1; serves requests for a checkpoint while it waits. None when stopping or when the run has no more."""
        task = self._prefetch(self.step + 1)
        while not task.done() and not self.stopping.is_set():
            self._wake.clear()
            if self._wanted:
                await self._checkpoint()
            if not (task.done() or self.stopping.is_set() or self._wanted):
                await self._wake.wait()
        if self.stopping.is_set() or not await self._turns.take(self.learner):
            return None
        self._prefetched = None
        return await task

    def _prefetch(self, number: int) -> asyncio.Task[Prefetched | None]:
        if self._prefetched is None:
            self._prefetched = asyncio.create_task(self._read(number), name=f"batch {number}")
            self._prefetched.add_done_callback(lambda _: self._wake.set())
        return self._prefetched

    async def _read(self, number: int) -> Prefetched | None:
        """A batch, and what can be made of it while the one before trains."""
        batch = await self._reader.next(number, self.incarnation)
        return batch and (batch, await asyncio.to_thread(self.learner.prepared, batch.groups, number))

    async def _train(self, batch: TrainingBatch, rows: list[Row] | None) -> None:
        """One optimizer step with everything that follows from it."""
        started, number, trainer = self.clock.monotonic(), batch.number, self.settings.trainer
        if number < self.settings.run.steps:
            self._prefetch(number + 1)
        self._training = True
        metrics, weights = await self._in_torch(self._apply, batch, rows, number % trainer.publish_every == 0)
        self.step, self._training, self._ledger_sequence = number, False, batch.ledger_sequence
        self._rewards.append(metrics["reward_mean"])
        if not (self.done or (self._prefetched and self._prefetched.done())):
            await self._turns.give(self.learner)
        ended = self.clock.monotonic()
        self.spans.trained(number, batch.audit, ended - started, self.incarnation)
        if weights is not None:
            await self._publish(weights)
        self._record(batch, metrics, step_s=ended - started, wait_s=started - self._ended)
        self.skips.judge(self.learner.skip, number, self.incarnation)
        self._ended = self.clock.monotonic()
        if self._wanted or number % trainer.checkpoint_every == 0:
            await self._checkpoint()

    def _apply(self, batch: TrainingBatch, rows: list[Row] | None, publish: bool) -> tuple[Metrics, Published | None]:
        """In the torch thread. The auditor's line is on disk before anything that the step changed leaves this process."""
        audited = self._auditing.submit(self.records.audit, batch.number, self.incarnation, batch.audit)
        metrics = self.learner.step(batch.groups, batch.number, rows)
        audited.result()
        return metrics, self._weights() if publish else None

    def _weights(self) -> Published:
        """In the torch thread: what a version is made of."""
        return self.learner.weights(), self.learner.probes() if self.settings.rollout.canary else None

    async def _publish(self, weights: Published) -> None:
        await self.publisher.submit(self.step, *weights)
        self._submitted = (self.step, self._submitted[1])

    def _published(self, seconds: float) -> None:
        self.telemetry.publish_seconds.observe(seconds)
        self.spans.published(self.context.policy_version, seconds)

    async def _checkpoint(self) -> None:
        """Begin a checkpoint of this step, once the former is done. Its writing and commit go on beside the next step."""
        self._wanted = False
        if self._submitted[1] == self.step:
            return
        await self._drain_checkpoint()
        snapshot: Snapshot = await self._in_torch(self.learner.snapshot)
        self._submitted = (self._submitted[0], self.step)
        self._checkpointing = self.context.lifecycle.spawn(
            f"checkpoint {self.step}", self._write_checkpoint(snapshot, self.step, self._notes()), endless=False)

    def _notes(self) -> dict[str, Any]:
        """What a checkpoint remembers of the loop."""
        return {"rewards": list(self._rewards), "skipped_in_a_row": self.skips.in_a_row}

    async def _write_checkpoint(self, snapshot: Snapshot, step: int, notes: dict[str, Any]) -> None:
        started = self.clock.monotonic()
        sequence, epoch = self._ledger_sequence, self._ledger_epoch

        async def save(_: None, timeout: float) -> Header:
            async with asyncio.timeout(timeout):
                return await self.checkpoints.save(
                    snapshot, step=step, incarnation=self.incarnation, ledger_sequence=sequence, ledger_epoch=epoch,
                    notes=notes)

        header = await rpc.call_until(save, None, WRITE_TIMEOUT_S, self.waits, f"checkpoint {step} to be written", self.clock)
        await self._commit(header)
        self.checkpoint_step = step
        self.telemetry.checkpoint_step.set(step)
        self.telemetry.checkpoint_seconds.observe(self.clock.monotonic() - started)
        log.info(f"checkpoint {header.name}", batch=step)
        try:
            await self.checkpoints.retain()
        except SlipstreamError as error:
            log.warning(f"older checkpoints could not be deleted: {error.message}")

    async def _commit(self, header: Header) -> None:
        if header.step:
            await rpc.call_until(
                self._batches.CommitBatches, batches_pb2.CommitBatchesRequest(
                    incarnation=self.incarnation, through_batch=header.step, checkpoint_key=header.manifest_key),
                RPC_TIMEOUT_S, self.waits, f"the commit of batch {header.step}", self.clock)

    async def _drain_checkpoint(self) -> None:
        if self._checkpointing is not None:
            with self.waits.on("the former checkpoint to be written and committed"):
                await self._checkpointing

    async def _end(self) -> None:
        """Leave everything durable. When the run is finished, also the last version and a Hugging Face model."""
        if self.stopping.is_set() or not await self._turns.take(self.learner):
            try:
                async with asyncio.timeout(STOP_S):
                    await self._checkpoint()
                    await self._drain_checkpoint()
            except TimeoutError:
                log.warning(f"stopping without the commit of batch {self.step}: the buffer or the store did not answer")
            return
        if self._submitted[0] < self.step:
            await self._publish(await self._in_torch(self._weights))
        await self._checkpoint()
        await self.publisher.drain()
        await self._drain_checkpoint()
        folder = self.settings.folder / "model"
        await self._in_torch(final_model.save, self.learner, folder)
        await self._turns.give(self.learner)
        log.info(f"run finished after step {self.step}: the model is in {folder}", step=self.step)
        self.context.lifecycle.finish()

    def _record(self, batch: TrainingBatch, metrics: Metrics, step_s: float, wait_s: float) -> None:
        elapsed_s = self.clock.monotonic() - self._ended
        self.last = {
            "step": batch.number, **metrics, "step_s": step_s, "wait_s": wait_s, "tokens_per_s": metrics["tokens"] / elapsed_s,
            "version": self.publisher.newest, "incarnation": self.incarnation, "checkpoint_step": self.checkpoint_step,
            "drops": batch.drops, "components": batch.components, "score_failures": batch.score_failures,
            "time_unix": self.clock.unix()}
        self.alarms.judge(self.last)
        self.last["alarms"] = self.alarms.raised
        self.records.metrics(self.last)
        show_metrics(self.telemetry, self.last)
        self._show()

    def _show(self) -> None:
        self.telemetry.step.set(self.step)
        self.telemetry.incarnation.set(self.incarnation)
        self.context.figures.clear()
        self.context.figures.update(
            {name: float(v) for name, v in self.last.items() if isinstance(v, (int, float))}, step=self.step,
            steps=self.settings.run.steps, checkpoint_step=self.checkpoint_step)

    async def _woken(self) -> None:
        self._wake.set()

    async def _in_torch(self, function: Callable[..., T], *arguments: Any) -> T:
        result = await asyncio.get_running_loop().run_in_executor(self._torch, function, *arguments)
        self._works += 1
        return result

    def _prove(self) -> None:
        """In the torch thread: one forward pass, so that a configuration that cannot run is told as one, and not in a loop."""
        def count(*_: object) -> None:
            self._works += 1

        self.learner.model.register_forward_hook(count)
        positions_suffice(self.learner.model, self.settings)
        prove_forward(self.learner, self.settings)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run to the end, or until the process is asked to stop. Returns whether it ended by itself."""
        task, stop = asyncio.create_task(work, name="trainer start"), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            return task.done() and not self.stopping.is_set()
        finally:
            stop.cancel()
            task.cancel()


def show_metrics(metrics: telemetry.TrainerMetrics, entry: Metrics) -> None:
    """One step's line as Prometheus metrics."""
    for name in ("reward_mean", "loss", "grad_norm", "entropy", "clip_share", "lag_mean", "lag_max", "learning_rate"):
        getattr(metrics, name).set(entry[name])
    for figure, gauge in metrics.of_step.items():
        if (value := entry.get(figure)) is not None:
            gauge.set(value)
    metrics.lag_tokens.clear()
    for lag, tokens in entry["lags"].items():
        metrics.lag_tokens.labels(lag).set(tokens)
    metrics.step_seconds.observe(entry["step_s"])
    metrics.wait_seconds.observe(entry["wait_s"])
    metrics.tokens.inc(entry["tokens"])
    metrics.trained_tokens.inc(entry["trained_tokens"])
    metrics.samples.inc(entry["samples"])
    metrics.groups.inc(entry["groups"])
    metrics.skipped_steps.inc(entry["skipped"])
