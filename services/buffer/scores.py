"""ScoreService: hop 3.

Consumes: LeaseUnscored, HeartbeatScoring, SubmitScores of reward workers.
Produces: scoring leases with transcripts; scored samples, and by them complete groups.
Waits for: an unscored sample (long poll). Unblocked by: a submitted sample, a lapsed scoring lease, the end of the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.rpc import status_pb2

from services.buffer.boundary import checked_score
from services.buffer.fold import Fold
from services.buffer.front import Front, from_lease, require, to_lease
from services.buffer.ledger import Outcome, Scored
from slipstream import rpc
from slipstream.errors import SlipstreamError
from slipstream.protos.buffer.v1 import scores_pb2, scores_pb2_grpc
from slipstream.sample import reward_of

_MOST_SAMPLES = 4096


class ScoreServicer(scores_pb2_grpc.ScoreServiceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front
        self._submit: Fold[Scored, Outcome] = Fold(front.ledger.submit_scores, lambda s: len(s.score))
        self._ttl = rpc.duration(front.ledger.rules.scoring_lease_ms / 1000)

    async def LeaseUnscored(self, request: scores_pb2.LeaseUnscoredRequest, context: Any) -> scores_pb2.LeaseUnscoredResponse:
        front = self._front
        require(bool(request.worker), "worker", request.worker, "name the worker, for logs and for those who wait for it")
        require(request.max_samples > 0, "max_samples", request.max_samples, "ask for at least one")
        count = min(request.max_samples, _MOST_SAMPLES)
        front.hear("reward", request.worker)
        grants = await front.changes.poll(
            "unscored", rpc.seconds(request.wait), lambda: front.ledger.grant_scoring(request.worker, count), len,
            last=lambda grants: len(grants) < count)
        response = scores_pb2.LeaseUnscoredResponse(ttl=self._ttl)
        one, draw = scores_pb2.UnscoredSample(), -1  # filled once for a draw, copied for each of its samples
        for grant in grants:
            lease = grant.lease
            if lease.draw != draw:
                draw, one = lease.draw, scores_pb2.UnscoredSample(task=front.task(grant))
                from_lease(one.lease, lease)
            one.lease.attempt, one.lease.sample.index, one.transcript = lease.attempt, lease.sample, grant.transcript
            response.samples.append(one)
        return response

    async def HeartbeatScoring(
            self, request: scores_pb2.HeartbeatScoringRequest, context: Any) -> scores_pb2.HeartbeatScoringResponse:
        leases = [to_lease(wire) for wire in request.leases]
        self._front.hear("reward", request.worker)
        outcomes = await self._front.ledger.heartbeat_scoring(leases) if leases else []
        return scores_pb2.HeartbeatScoringResponse(statuses=self._front.statuses(outcomes, leases))

    async def SubmitScores(self, request: scores_pb2.SubmitScoresRequest, context: Any) -> scores_pb2.SubmitScoresResponse:
        front, scored = self._front, []
        refused: dict[int, status_pb2.Status] = {}
        for n, wire in enumerate(request.scores):
            try:
                scored.append(Scored(to_lease(wire.lease), checked_score(wire.score), reward_of(wire.score)))
            except SlipstreamError as error:
                refused[n] = front.rejected(error)
        outcomes: Sequence[Outcome] = await self._submit(scored)
        statuses = front.statuses(outcomes, [s.lease for s in scored], outdated_is_ok=True)
        for n in sorted(refused):
            statuses.insert(n, refused[n])
        return scores_pb2.SubmitScoresResponse(statuses=statuses)
