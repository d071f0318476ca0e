"""The weight server: byte ranges of policy versions from memory, so that readers cost the object store one read.

Consumes: ReadRange calls of rollout workers, the object store. Produces: bytes. Waits for: the object store.
Unblocked by: its answer. Holds nothing that anybody needs: when it is gone, workers read the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.weights.memory import RangeMemory
from slipstream.lifecycle import CLOSE
from slipstream.protos.weights.v1 import weights_pb2 as pb
from slipstream.ranges import Range, Span
from slipstream.service import ServiceContext
from slipstream.telemetry import WeightServerMetrics

SERVICE, METHOD = "slipstream.weights.v1.WeightService", "ReadRange"


class WeightServicer:
    """slipstream.weights.v1.WeightService. Its answers are bytes already: `add_weight_service` registers it without a second
    serialization."""

    def __init__(self, memory: RangeMemory, metrics: WeightServerMetrics) -> None:
        self._memory, self._metrics = memory, metrics

    async def ReadRange(self, request: pb.ReadRangeRequest, context: Any) -> AsyncIterator[bytes]:
        spans = tuple(Span(c.offset, c.size or None, c.crc32c) for c in request.checks)
        wanted = Range(request.key, request.offset, request.size or None, spans)
        for frame in await self._memory.frames(wanted):
            yield frame
            self._metrics.sent_bytes.inc(len(frame))


def add_weight_service(servicer: WeightServicer, server: Any) -> None:
    """As the generated function of the same purpose, for answers that are serialized."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.ReadRange, request_deserializer=pb.ReadRangeRequest.FromString, response_serializer=bytes)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


async def start(context: ServiceContext) -> None:
    """Serve. Raises ConfigError."""
    metrics = WeightServerMetrics(context.registry)
    memory = RangeMemory(context.store, context.run.objects.near.server_bytes, metrics)
    context.lifecycle.on_stop(CLOSE, memory.close, "reads of the object store")
    await context.serve([(add_weight_service, WeightServicer(memory, metrics))])
