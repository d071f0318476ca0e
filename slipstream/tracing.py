"""One sample through all hops, as an OpenTelemetry trace; off unless the run file names a collector (`[tracing]`).

    draw ─┬─ lease ─ generation ─ submit ─ store sample ─ scoring ─ store score ─ batch ─ train ─ publish
          └─ a second lease and generation, when the first worker was lost

The id of a trace, and of its first span, is a hash of (run, ledger epoch, draw, sample): every process knows it from what the
lease says, so no message carries it, and a retried sample goes on in the same trace. A hash of the draw decides whether its
samples are traced, everywhere alike and all of a group: one waits for the other. To find a sample's trace:

    python -m slipstream.tracing RUN DRAW SAMPLE [EPOCH]

Spans say who, when and how much: never a prompt, an answer or a token. They go to the collector from a thread of their own;
what it does not take within EXPORT_S, or does not fit into the queue, is dropped and counted (slipstream_trace_spans_total).
Without a collector nothing of OpenTelemetry is imported, and a service pays for asking whether there is one.

Left out: spans of calls that belong to no sample (heartbeats, checkpoints); metrics have those.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream import logs
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import grpc
    from opentelemetry.trace import Span

    from slipstream.config import RunFile
    from slipstream.lifecycle import Clock
    from slipstream.protos.types.v1.sample_pb2 import Lease

HEADER = "traceparent"
QUEUE, LOT, PERIOD_S = 8192, 512, 1.0  # spans that wait, spans of one message, how often they go
EXPORT_S, CLOSE_S, GRACE_S = 3.0, 5.0, 2.0  # for one message; at a stop for all that is left, and for the thread to end
_KEY = ("epoch", "draw", "sample", "attempt")
Key = tuple[int, int, int, int]  # ledger epoch, draw, sample, attempt
Count = Callable[[str, int], None]

log = logs.get("tracing")
_behalf: contextvars.ContextVar[str] = contextvars.ContextVar("slipstream_traceparent", default="")


def ids(run: str, epoch: int, draw: int, sample: int) -> tuple[int, int]:
    """The id of a sample's trace (128 bits) and of its first span (64 bits)."""
    digest = hashlib.blake2b(f"{run}/{epoch}/{draw}/{sample}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")


def drawn(run: str, epoch: int, draw: int) -> float:
    """Where a draw lies in [0, 1): those below tracing.sample_share are traced."""
    return int.from_bytes(hashlib.blake2b(f"{run}/{epoch}/{draw}".encode(), digest_size=6).digest(), "big") / 2**48


def traceparent() -> str:
    """For the code of an environment: the W3C `traceparent` of the sample that this call is made for, or "".

    Give it on to what you call, and its spans belong to the sample's trace. A call for several samples names one only when just
    one of them is traced.
    """
    return _behalf.get()


@contextlib.contextmanager
def on_behalf(parent: str) -> Iterator[None]:
    """What the block calls is for the sample of this `traceparent`; "" is nobody in particular."""
    token = _behalf.set(parent)
    try:
        yield
    finally:
        _behalf.reset(token)


def received(context: grpc.aio.ServicerContext) -> contextlib.AbstractContextManager[None]:
    """`on_behalf` of what came with a call."""
    for key, value in context.invocation_metadata() or ():
        if key == HEADER and isinstance(value, str):
            return on_behalf(value)
    return contextlib.nullcontext()


def carrying(method: Any) -> Any:
    """A method of a stub that sends the `traceparent` of the moment, if there is one."""
    parent = _behalf.get()
    return functools.partial(method, metadata=((HEADER, parent),)) if parent else method


class Tracer:
    """Makes the spans of one process."""

    def __init__(self, run: RunFile, service: str, instance: str, clock: Clock, count: Count) -> None:
        """Raises ConfigError when the packages are not there. A collector that is not there is no error."""
        try:
            import opentelemetry.trace as api
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider, sampling
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            self._outbox = outbox(run, count)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tracing.endpoint = {run.tracing.endpoint!r} needs {error.name}: pip install 'slipstream[tracing]', or remove "
                "the setting") from None
        self._api = api
        self._run, self._clock = run.run.name, clock
        share = run.tracing.sample_share
        self._chosen = functools.lru_cache(1 << 14)(lambda epoch, draw: drawn(run.run.name, epoch, draw) < share)
        self._processor = BatchSpanProcessor(
            self._outbox, max_queue_size=QUEUE, schedule_delay_millis=PERIOD_S * 1000, max_export_batch_size=LOT)
        self._ids = _id_generator()
        provider = TracerProvider(
            sampling.ALWAYS_ON, Resource({
                "service.name": f"slipstream-{service}", "service.namespace": run.run.name, "service.instance.id": instance}),
            shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("slipstream")

    def now(self) -> int:
        """Nanoseconds since 1970."""
        return int(self._clock.unix() * 1e9)

    def traced(self, epoch: int, draw: int, sample: int) -> tuple[int, int] | None:
        """The ids of a sample's trace; None for one that is not traced."""
        return ids(self._run, epoch, draw, sample) if self._chosen(epoch, draw) else None

    def begin(
        self, name: str, of: tuple[int, int], key: Sequence[int], started: int | None = None, root: bool = False,
        **attributes: Any,
    ) -> Span:
        """A span of the sample `of`, whose key is (epoch, draw, sample) or also the attempt; `root`: its first."""
        api = self._api
        parent = api.INVALID_SPAN
        if root:
            self._ids.next = of
        else:
            parent = api.NonRecordingSpan(api.SpanContext(*of, is_remote=True, trace_flags=api.TraceFlags(1)))
        named = dict(zip(_KEY, key, strict=False)) | attributes
        return self._tracer.start_span(
            name, api.set_span_in_context(parent), attributes={f"slipstream.{n}": value for n, value in named.items()},
            start_time=started or self.now())

    def hop(
        self, name: str, samples: Iterable[Sequence[int]], started: int, ended: int | None = None,
        **attributes: Any,
    ) -> None:
        """One finished span for each of these samples, by key, that is traced."""
        for key in samples:
            if of := self.traced(*key[:3]):
                self.end(self.begin(name, of, key, started, **attributes), ended)

    def end(self, span: Span, ended: int | None = None, **attributes: Any) -> None:
        """Close a span; it is on its way from here on."""
        for name, value in attributes.items():
            span.set_attribute(f"slipstream.{name}", value)
        if self._outbox.admit():
            span.end(ended or self.now())

    def event(self, span: Span, name: str, **attributes: Any) -> None:
        """Something that happened within a span, now."""
        span.add_event(name, {f"slipstream.{n}": value for n, value in attributes.items()}, self.now())

    async def close(self) -> None:
        """Send what is left, for at most CLOSE_S and one message; the rest is dropped and counted. Never fails."""
        self._outbox.deadline = time.monotonic() + CLOSE_S
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def flush() -> None:
            self._processor.shutdown()
            loop.call_soon_threadsafe(done.set)

        threading.Thread(target=flush, name="flush traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S + EXPORT_S + GRACE_S):
                await done.wait()
        except TimeoutError:
            log.warning("the last spans were left behind: the collector holds on to a message")
        self._outbox.rest()


def outbox(run: RunFile, count: Count) -> Any:
    """The exporter of a run. Counts every span: exported, refused (by the collector) or dropped (for want of room or time)."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each message that fails; one of ours says it

    class Outbox(SpanExporter):
        """Knows how many spans wait: those admitted and not yet taken out."""

        def __init__(self) -> None:
            self._inner = OTLPSpanExporter(timeout=EXPORT_S, **_channel(run))
            self.deadline = float("inf")
            self._admitted = self._taken = 0
            self._failing = False

        def admit(self) -> bool:
            """Whether there is room for one more; called in the event loop's thread."""
            if self._admitted - self._taken >= QUEUE:
                count("dropped", 1)
                return False
            self._admitted += 1
            return True

        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            """In the thread of the processor."""
            self._taken += len(spans)
            if time.monotonic() > self.deadline:
                count("dropped", len(spans))
                return SpanExportResult.FAILURE
            try:
                result = self._inner.export(spans)
            except Exception as error:  # a fault of ours; the processor would keep it to itself
                log.exception("spans could not be sent", error=error)
                result = SpanExportResult.FAILURE
            failed = result is not SpanExportResult.SUCCESS
            count("refused" if failed else "exported", len(spans))
            if failed != self._failing:
                self._failing = failed
                if failed:
                    log.warning(f"the collector at {run.tracing.endpoint} takes no spans: they are dropped, and counted")
                else:
                    log.info("the collector takes spans again")
            return result

        def rest(self) -> None:
            """Count what was never taken out."""
            if left := self._admitted - self._taken:
                count("dropped", left)

        def shutdown(self) -> None:
            self._inner.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return True

    return Outbox()


def _channel(run: RunFile) -> dict[str, Any]:
    """How the collector is reached: plaintext on loopback or when it is meant, else TLS."""
    import grpc

    from slipstream.rpc import is_loopback

    settings = run.tracing
    if settings.insecure or (not settings.ca_file and is_loopback(settings.endpoint)):
        return {"endpoint": settings.endpoint, "insecure": True}
    try:
        roots = Path(settings.ca_file).read_bytes() if settings.ca_file else None
    except OSError as error:
        raise ConfigError(f"tracing.ca_file = {settings.ca_file!r} cannot be read: {error.strerror}") from None
    return {"endpoint": settings.endpoint, "insecure": False, "credentials": grpc.ssl_channel_credentials(roots)}


def _id_generator() -> Any:
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        """Random, but for the first span of a trace: `next` names it."""

        next: tuple[int, int] | None = None

        def generate_trace_id(self) -> int:
            return self.next[0] if self.next else super().generate_trace_id()

        def generate_span_id(self) -> int:
            given, self.next = self.next, None
            return given[1] if given else super().generate_span_id()

    return Ids()


class OpenSpans:
    """The spans of one name that are open in a process, by sample; does nothing without a tracer."""

    def __init__(self, tracer: Tracer | None, name: str) -> None:
        self._tracer, self._name = tracer, name
        self._spans: dict[Key, Span] = {}

    def begin(self, leases: Iterable[Lease], **attributes: Any) -> None:
        """Of those that are traced."""
        if self._tracer is None:
            return
        for lease in leases:
            draw = lease.sample.draw
            if of := self._tracer.traced(draw.ledger_epoch, draw.number, lease.sample.index):
                key = (draw.ledger_epoch, draw.number, lease.sample.index, lease.attempt)
                self._spans[key] = self._tracer.begin(self._name, of, key, **attributes)

    def event(self, keys: Iterable[Key] | None, name: str, **attributes: Any) -> None:
        """Something happened to these samples; None = to all in hand."""
        if self._tracer is not None and self._spans:
            for key in list(self._spans) if keys is None else keys:
                if span := self._spans.get(key):
                    self._tracer.event(span, name, **attributes)

    def end(self, key: Key, outcome: str, **attributes: Any) -> bool:
        """Close the span of a sample; whether there was one."""
        if self._tracer is None or (span := self._spans.pop(key, None)) is None:
            return False
        self._tracer.end(span, outcome=outcome, **attributes)
        return True

    def parent(self, keys: Iterable[Key]) -> str:
        """The `traceparent` for a call made for these samples: of the traced one, when it is the only one."""
        found = [span for key in keys if (span := self._spans.get(key))] if self._spans else []
        if len(found) != 1:
            return ""
        context = found[0].get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def main() -> int:
    """Print the id of a sample's trace."""
    given = sys.argv[1:]
    if len(given) not in (3, 4) or not all(part.isdigit() for part in given[1:]):
        print("usage: python -m slipstream.tracing RUN DRAW SAMPLE [EPOCH], e.g. sort-digits 401 3", file=sys.stderr)
        return 2
    draw, sample, epoch = int(given[1]), int(given[2]), int(given[3]) if len(given) == 4 else 1
    print(f"{ids(given[0], epoch, draw, sample)[0]:032x}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
