"""Control of a running trainer over gRPC: proto in and out, no logic."""

from __future__ import annotations

from typing import Any

from services.trainer.loop import TrainerLoop
from slipstream.protos.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from slipstream.service import ServiceContext


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """See slipstream.trainer.v1.TrainerService."""

    def __init__(self, loop: TrainerLoop) -> None:
        self._loop = loop

    async def GetProgress(self, request: trainer_pb2.GetProgressRequest, context: Any) -> trainer_pb2.GetProgressResponse:
        loop = self._loop
        return trainer_pb2.GetProgressResponse(
            step=loop.step, steps=loop.settings.run.steps, incarnation=loop.incarnation, checkpoint_step=loop.checkpoint_step,
            published=loop.context.policy_version,
            metrics={name: value for name, value in loop.last.items() if isinstance(value, (int, float))})

    async def RequestCheckpoint(
        self, request: trainer_pb2.RequestCheckpointRequest, context: Any,
    ) -> trainer_pb2.RequestCheckpointResponse:
        return trainer_pb2.RequestCheckpointResponse(step=self._loop.request_checkpoint())


async def start(context: ServiceContext) -> None:
    """Serve, then train."""
    loop = TrainerLoop(context)
    await context.serve([(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, TrainerServicer(loop))])
    context.lifecycle.spawn("trainer loop", loop.run(), endless=False)
