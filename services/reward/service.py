"""The reward service: RewardService over the scorers, and the worker that pulls from the buffer."""

from __future__ import annotations

from typing import Any

from services.reward.sandbox import Sandbox
from services.reward.scorers import Scorers
from services.reward.worker import ScoringWorker
from slipstream.errors import SlipstreamError, to_status
from slipstream.lifecycle import CLOSE
from slipstream.protos.reward.v1 import reward_pb2 as pb
from slipstream.protos.reward.v1 import reward_pb2_grpc
from slipstream.service import ServiceContext


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """slipstream.reward.v1.RewardService over Scorers."""

    def __init__(self, scorers: Scorers) -> None:
        self._scorers = scorers

    async def ScoreTranscripts(self, request: pb.ScoreTranscriptsRequest, context: Any) -> pb.ScoreTranscriptsResponse:
        return pb.ScoreTranscriptsResponse(results=[
            pb.ScoreResult(status=to_status(r)) if isinstance(r, SlipstreamError) else pb.ScoreResult(score=r)
            for r in await self._scorers.score_all(request.transcripts)])


async def start(context: ServiceContext) -> None:
    """Check the run file's scorers, serve, start the loops. Raises ConfigError for a scorer that cannot be used."""
    settings = context.run.reward
    sandbox = Sandbox(settings.processes, settings.timeout_s)
    context.lifecycle.on_stop(CLOSE, sandbox.close, "scorer processes")
    scorers = Scorers(sandbox)
    for scorer in sorted({e.scorer for e in context.run.environments if e.scorer}):
        await scorers.check(scorer)
    await context.serve([(reward_pb2_grpc.add_RewardServiceServicer_to_server, RewardServicer(scorers))])
    ScoringWorker(context, scorers).start()
