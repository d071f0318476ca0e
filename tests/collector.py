"""A collector of traces: OTLP over gRPC, as any real one takes it, with what came kept in a list."""

from __future__ import annotations

import threading
from collections import defaultdict
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    """What arrived of one span. Times in nanoseconds."""

    service: str
    instance: str
    name: str
    trace: str
    id: str
    parent: str
    started: int
    ended: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return self.attributes.get("attempt", 0)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of loopback: `with Collector() as collector: collector.address`."""

    def __init__(self, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> None:
        self._lock, self._spans = threading.Lock(), []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        where = f"127.0.0.1:{port}"
        found = self._server.add_secure_port(where, credentials) if credentials else self._server.add_insecure_port(where)
        self.address = f"127.0.0.1:{found}"

    def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        found = []
        for resource in request.resource_spans:
            of = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for s in scope.spans:
                    found.append(Span(
                        of["service.name"], of["service.instance.id"], s.name, s.trace_id.hex(), s.span_id.hex(),
                        s.parent_span_id.hex(), s.start_time_unix_nano, s.end_time_unix_nano, _attributes(s.attributes),
                        [(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in s.events]))
        with self._lock:
            self._spans += found
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    @property
    def traces(self) -> dict[str, list[Span]]:
        """By trace, in the order of their start."""
        found = defaultdict(list)
        for span in self.spans:
            found[span.trace].append(span)
        return {trace: sorted(spans, key=lambda s: s.started) for trace, spans in found.items()}

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(5)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {p.key.removeprefix("slipstream."): getattr(p.value, p.value.WhichOneof("value")) for p in pairs}
