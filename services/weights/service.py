"""The weight server: byte ranges of policy versions from memory, so that readers cost the object store one read.

Consumes: ReadRange calls of rollout workers, the object store. Produces: bytes. Waits for: the object store.
Unblocked by: its answer. Holds nothing that anybody needs: when it is gone, workers read the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from services.weights.memory import RangeMemory
from slipstream.lifecycle import CLOSE
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.range_calls import add_weight_service, range_of
from slipstream.service import ServiceContext
from slipstream.telemetry import WeightServerMetrics


class WeightServicer:
    """slipstream.weights.v1.WeightService. Its answers are bytes already: `add_weight_service` registers it without a second
    serialization."""

    def __init__(self, memory: RangeMemory, metrics: WeightServerMetrics) -> None:
        self._memory, self._metrics = memory, metrics

    async def ReadRange(self, request: pb.ReadRangeRequest, context: Any) -> AsyncIterator[bytes]:
        for frame in await self._memory.frames(range_of(request)):
            yield frame
            self._metrics.sent_bytes.inc(len(frame))


async def start(context: ServiceContext) -> None:
    """Serve. Raises ConfigError."""
    metrics = WeightServerMetrics(context.registry)
    memory = RangeMemory(context.store, context.run.objects.near.server_bytes, metrics)
    context.lifecycle.on_stop(CLOSE, memory.close, "reads of the object store")
    await context.serve([(add_weight_service, WeightServicer(memory, metrics))])
