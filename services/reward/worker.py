"""Hop 3 of the walk: lease unscored samples, score them, submit the scores.

consumes: unscored samples (buffer, LeaseUnscored, a long poll)    produces: scores (buffer, SubmitScores)
waits for: unscored samples; room when `batch` samples are in hand; the scorers; the buffer when it is away
unblocked by: a submitted sample or the end of the poll; a finished score; a scorer's time limit; the buffer's return

Three loops share what is in hand. Scores are submitted as they come, all that are there in one call, so one slow sample holds
back nobody. A failing scorer is a score with a reason. When the process dies its leases lapse, and others score them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import nullcontext

from google.protobuf.message import DecodeError

from services.reward.scorers import Scorers
from slipstream import logs, rpc, tracing
from slipstream.errors import from_status
from slipstream.lifecycle import FINISH, STOP_INTAKE
from slipstream.protos.buffer.v1 import scores_pb2 as pb
from slipstream.protos.buffer.v1.scores_pb2_grpc import ScoreServiceStub
from slipstream.protos.types.v1.sample_pb2 import Lease, Score, Transcript
from slipstream.service import ServiceContext
from slipstream.telemetry import RewardMetrics

POLL_S = 20.0
CALL_S = 30.0
HEARTBEATS_PER_LEASE = 4

log = logs.get("reward")
Key = tuple[int, int, int, int]  # ledger epoch, draw, sample, attempt


class ScoringWorker:
    """The loops of one reward process."""

    def __init__(self, context: ServiceContext, scorers: Scorers) -> None:
        self._context, self._scorers = context, scorers
        self._buffer = ScoreServiceStub(context.channel)
        metrics = RewardMetrics(context.registry)  # looking a label up takes as long as to judge an exact match
        self._scored_well, self._scored_badly = metrics.scores.labels("scored"), metrics.scores.labels("failed")
        self._seconds = functools.cache(metrics.score_seconds.labels)
        self._batch = context.run.reward.batch
        self._ttl_s = context.run.reward.lease_s
        self._in_hand: set[Key] = set()  # leased and not yet submitted
        self._scoring: dict[Key, Lease] = {}  # those of them whose score is not known yet
        self._finished: list[tuple[Key, pb.ScoredSample]] = []
        self._scored = 0
        self._spans = tracing.OpenSpans(context.tracer, "scoring")  # of `_scoring`
        self._room, self._news, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._note()

    def start(self) -> None:
        """Spawn the loops, and their end in stages."""
        lifecycle = self._context.lifecycle
        self._context.judge_progress(
            lambda: self._scored, lambda: f"scores of {len(self._scoring)} samples" if self._scoring else "")
        leasing = lifecycle.spawn("lease", self._lease())
        lifecycle.spawn("submit", self._submit())
        lifecycle.spawn("heartbeat", self._heartbeat())

        async def stop_leasing() -> None:
            leasing.cancel("stopping")

        lifecycle.on_stop(STOP_INTAKE, stop_leasing, "lease")
        lifecycle.on_stop(FINISH, self._empty.wait, "samples in hand")

    async def _lease(self) -> None:
        """Take samples while there is room; score each lot beside the next poll."""
        context, lots = self._context, 0
        while True:
            full = f"scorers: {len(self._in_hand)} samples in hand"
            with context.waits.on(full, patient=True) if self._full else nullcontext():
                await self._room.wait()
            request = pb.LeaseUnscoredRequest(
                worker=context.arguments.instance, max_samples=self._batch - len(self._in_hand), wait=rpc.duration(POLL_S))
            response = await rpc.call_until(
                self._buffer.LeaseUnscored, request, POLL_S + CALL_S, context.waits, "samples to score", context.clock)
            self._ttl_s = rpc.seconds(response.ttl) or self._ttl_s
            if response.samples:
                leases = [s.lease for s in response.samples]
                keys = [_key(lease) for lease in leases]
                self._scoring.update(zip(keys, leases, strict=True))
                self._in_hand.update(keys)
                self._spans.begin(leases, worker=context.arguments.instance)
                self._note()
                transcripts = [_transcript(s) for s in response.samples]
                context.lifecycle.spawn(f"score lot {(lots := lots + 1)}", self._score(keys, transcripts), endless=False)

    async def _score(self, keys: Sequence[Key], transcripts: Sequence[Transcript]) -> None:
        """Score one lot. Every sample ends in `_finished`, whatever its transcript is."""

        def done(i: int, score: Score, seconds: float) -> None:
            self._scored += 1
            (self._scored_badly if score.failure else self._scored_well).inc()
            if seconds:
                self._seconds(transcripts[i].scorer).observe(seconds)
            self._spans.end(key := keys[i], "failed" if score.failure else "scored", scorer=transcripts[i].scorer)
            if lease := self._scoring.pop(key, None):
                self._finished.append((key, pb.ScoredSample(lease=lease, score=score)))
                self._news.set()

        await self._scorers.score(transcripts, done)
        self._context.details["failures"] = dict(self._scorers.failures)
        self._context.figures["scorer_processes_killed"] = self._scorers.sandbox.kills

    async def _submit(self) -> None:
        """Hand in what is finished: one call for all that came during the last."""
        context = self._context
        while True:
            await self._news.wait()
            self._news.clear()
            finished, self._finished = self._finished, []
            if not finished:
                continue
            request = pb.SubmitScoresRequest(worker=context.arguments.instance, scores=[score for _, score in finished])
            response = await rpc.call_until(
                self._buffer.SubmitScores, request, CALL_S, context.waits, f"buffer: {len(finished)} scores", context.clock)
            for (key, scored), status in zip(finished, response.statuses, strict=True):
                self._in_hand.discard(key)
                if error := from_status(status):
                    log.warning("score refused", reason=error.reason, error=error.message, draw=key[1], sample=key[2])
                elif scored.score.failure:
                    log.warning("scorer failed", failure=logs.Content(scored.score.failure), draw=key[1], sample=key[2])
            self._note()

    async def _heartbeat(self) -> None:
        """Keep the leases of what is being scored; forget those that others have by now."""
        context = self._context
        while True:
            await context.clock.sleep(self._ttl_s / HEARTBEATS_PER_LEASE)
            if not self._scoring:
                continue
            keys, leases = list(self._scoring), list(self._scoring.values())
            request = pb.HeartbeatScoringRequest(worker=context.arguments.instance, leases=leases)
            response = await rpc.call_until(
                self._buffer.HeartbeatScoring, request, CALL_S, context.waits, "buffer: heartbeat of scoring leases",
                context.clock)
            refused = [key for key, status in zip(keys, response.statuses, strict=True) if from_status(status)]
            if lost := [key for key in refused if self._scoring.pop(key, None)]:  # others were scored during the call
                self._in_hand.difference_update(lost)
                for key in lost:
                    self._spans.end(key, "lost")
                log.info("scoring leases lost", samples=len(lost), draw=lost[0][1], sample=lost[0][2], attempt=lost[0][3])
            self._note()

    @property
    def _full(self) -> bool:
        return len(self._in_hand) >= self._batch

    def _note(self) -> None:
        """Set the events that follow from how much is in hand."""
        for event, state in ((self._room, not self._full), (self._empty, not self._in_hand)):
            event.set() if state else event.clear()


def _transcript(sample: pb.UnscoredSample) -> Transcript:
    """The transcript; for bytes that are none, one whose scorer is unknown and says so."""
    try:
        return Transcript.FromString(sample.transcript)
    except DecodeError:
        return Transcript(scorer="(the transcript cannot be decoded)")


def _key(lease: Lease) -> Key:
    draw = lease.sample.draw
    return draw.ledger_epoch, draw.number, lease.sample.index, lease.attempt
