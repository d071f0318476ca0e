"""What every service process has in common: command line, context, status, service file, exit codes.

    python -m services.<service> --run-file PATH --instance NAME --buffer HOST:PORT [--port N] [--metrics-port N]

A service's __main__ is `main("reward", start)`; its `start(context)` builds servicers, calls `await context.serve([...])` and
spawns its loops on `context.lifecycle`. The supervisor and Kubernetes start it the same way.

Exit codes: 0 stopped or finished; 1 an error, restart may help; 2 the run file or the command line cannot be used, restart does
not help; 3 fenced by a newer process, restart would fight it; killed by the signal when it came twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import grpc
from prometheus_client import CollectorRegistry

from slipstream import auth_credentials, logs, rpc, telemetry, tracing
from slipstream.auth_credentials import Credentials
from slipstream.errors import ConfigError, InvalidInput, SlipstreamError
from slipstream.lifecycle import CLOSE, EXIT_CONFIG, FLUSH, NOT_SERVING, Clock, Lifecycle, SystemClock, Waits
from slipstream.objects import ObjectStore, open_store
from slipstream.progress import Progress
from slipstream.protos.types.v1 import policy_pb2, status_pb2, status_pb2_grpc
from slipstream.service_command import WEIGHTS, ServiceArguments, arguments

DEBUG = "SLIPSTREAM_DEBUG"
_WRITERS = ("buffer", "trainer")  # services that cannot work on an object store that ignores conditions

# Who computes needs the interpreter again after each operation: another thread that has it meanwhile lets go of it after this.
SWITCH_S = 0.0005
SHOWN_S = 1.0  # lack of progress that status shows as a wait

log = logs.get("service")


class ServiceContext:
    """What a service is given. `figures` and `details` are shown by status; set them, and `policy_version`, at will."""

    def __init__(
        self, args: ServiceArguments, lifecycle: Lifecycle, clock: Clock, store: ObjectStore,
        credentials: Credentials | None = None, registry: CollectorRegistry | None = None,
    ) -> None:
        self.arguments = args
        self.run = args.run
        self.lifecycle = lifecycle
        self.clock = clock
        self.waits = Waits(clock)
        self.store = store
        self.registry = registry or CollectorRegistry()
        self.metrics = telemetry.ProcessMetrics(self.registry, args.service)
        self.tracer = self._traced()
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self.policy_version: policy_pb2.PolicyVersion | None = None
        self.address = ""
        self.metrics_address = ""
        self.started = clock.monotonic()
        self.credentials = credentials or Credentials(args.service)
        self._progress: Progress | None = None
        self._channel: grpc.aio.Channel | None = None

    def _traced(self) -> tracing.Tracer | None:
        """What makes spans; None unless the run file names a collector. Raises ConfigError when the packages are missing."""
        if not self.run.tracing.endpoint:
            return None
        metrics = telemetry.TraceMetrics(self.registry)
        tracer = tracing.Tracer(
            self.run, self.arguments.service, self.arguments.instance, self.clock,
            lambda outcome, count: metrics.spans.labels(outcome).inc(count))
        self.lifecycle.on_stop(CLOSE, tracer.close, "traces")
        return tracer

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the buffer, made at first use, with this service's role."""
        if self._channel is None:
            self._channel = rpc.channel(self.arguments.buffer, credentials=self.credentials)
        return self._channel

    @property
    def state(self) -> str:
        """Health in one word: starting, serving, draining or stalled."""
        if self.lifecycle.stopping.is_set():
            return "draining"
        if not self.address:
            return "starting"
        if self.lifecycle.finished:
            return "finished"
        return "stalled" if self.stalled else "serving"

    def judge_progress(self, marker: Callable[[], object], awaiting: Callable[[], str]) -> None:
        """Say what counts as progress here and what it is awaited for; see slipstream.progress."""
        self._progress = Progress(self.clock, marker, awaiting)

    @property
    def awaited(self) -> tuple[str, float]:
        """What this process has got on without for the longest, and the seconds: a wait, or progress that does not come."""
        wait = self.waits.impatient or ("", 0.0)
        return max(wait, self._progress.awaited, key=lambda a: a[1]) if self._progress is not None else wait

    @property
    def stuck(self) -> bool:
        """Whether the lack of progress alone has lasted longer than service.stall_s."""
        return self._progress is not None and self._progress.awaited[1] > self.run.service.stall_s

    @property
    def stalled(self) -> bool:
        """Whether one wait, or the lack of progress, has lasted longer than service.stall_s."""
        return self.awaited[1] > self.run.service.stall_s

    async def serve(self, registrations: Sequence[rpc.Registration]) -> str:
        """Start gRPC (with health, reflection and StatusService) and metrics, write the service file. Returns host:port."""
        args = self.arguments
        status = (status_pb2_grpc.add_StatusServiceServicer_to_server, _StatusServicer(self))
        server = rpc.Server(
            args.host, args.port, [*registrations, status], observe=self.metrics.observe_rpc, credentials=self.credentials,
            client_port=args.client_port, health_port=args.health_port)
        await server.start()
        self.lifecycle.on_stop(NOT_SERVING, lambda: server.set_serving(False), "health")
        self.lifecycle.on_stop(FLUSH, server.stop, "gRPC server")
        if self.run.service.metrics:
            self.metrics_address = telemetry.serve(self.registry, args.metrics_port, args.host)
        self.address = server.address
        path = self._write_service_file()
        self.lifecycle.on_stop(CLOSE, lambda: _unlink(path), "service file")
        log.info("serving", address=self.address, metrics_address=self.metrics_address)
        return self.address

    async def watch_waits(self) -> None:
        """Keep the metrics of waits and progress up to date, and say once when a stall begins and once when it ends."""
        told = False
        while True:
            if self._progress is not None:
                self._progress.look()
                self.metrics.progress_age_seconds.set(self._progress.age_s)
            awaited, stalled = self.awaited, self.stalled
            self.metrics.waiting(self.waits.current, stalled)
            if stalled and not told:
                log.error(
                    f"stalled: waiting for {self._sayable(awaited[0])}", waited_s=round(awaited[1], 1),
                    stall_s=self.run.service.stall_s)
            elif told and not stalled:
                log.info("no longer stalled")
            told = stalled
            await self.clock.sleep(min(1.0, self.run.service.stall_s / 4))

    def _sayable(self, sentence: str) -> str:
        """A wait's sentence for the log: what follows its colon may be the message of a user's code."""
        return sentence if self.run.security.log_content else re.sub(r"(raised \w+).*", rf"\1 {logs.WITHHELD}", sentence)

    async def close(self) -> None:
        """Close what the context opened itself."""
        if self._channel is not None:
            await self._channel.close()

    def _write_service_file(self) -> Path:
        args = self.arguments
        path = self.run.folder / "services" / f"{args.instance}.json"
        content = {
            "service": args.service, "instance": args.instance, "pid": os.getpid(), "address": self.address,
            "metrics_address": self.metrics_address, "started_unix": self.clock.unix()}
        with writable(self.run.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            temp = path.with_name(f".{path.name}.{os.getpid()}")
            temp.write_text(json.dumps(content))
            temp.replace(path)
            self._write_run_file()
        return path

    def _write_run_file(self) -> None:
        """Where no supervisor wrote the resolved run file (a pod), the command line finds the run in this folder, too."""
        run, args, path = self.run, self.arguments, self.run.folder / "run.json"
        if path.exists():
            return
        given = {"tls_dir": args.tls_dir, "secret_file": args.secret_file}
        security = run.security.model_copy(update={name: value for name, value in given.items() if value})
        buffer = args.buffer or f"127.0.0.1:{self.address.rpartition(':')[2]}"
        service = run.service.model_copy(update={"buffer_address": buffer})
        temp = path.with_name(f".run.json.{os.getpid()}")
        temp.write_text(run.model_copy(update={"security": security, "service": service}).model_dump_json(indent=1))
        temp.replace(path)


class _StatusServicer(status_pb2_grpc.StatusServiceServicer):
    def __init__(self, context: ServiceContext) -> None:
        self._context = context

    async def GetStatus(self, request: status_pb2.GetStatusRequest, context: Any) -> status_pb2.GetStatusResponse:
        own = self._context
        awaited = own.awaited
        shown = awaited if own.stalled else own.waits.current
        sentence, waited_s = shown or (awaited if awaited[1] >= SHOWN_S else ("", 0.0))
        response = status_pb2.GetStatusResponse(
            run=own.run.run.name, service=own.arguments.service, instance=own.arguments.instance, state=own.state,
            waiting_for=sentence, waited=rpc.duration(waited_s), uptime=rpc.duration(own.clock.monotonic() - own.started),
            policy_version=own.policy_version, figures=telemetry.figures(own.registry) | own.figures)
        response.details.update(json.loads(json.dumps(own.details, default=str)))
        return response


@contextlib.asynccontextmanager
async def open_context(args: ServiceArguments, lifecycle: Lifecycle, clock: Clock) -> AsyncIterator[ServiceContext]:
    """A context with its object store opened and probed. Raises ConfigError."""
    with writable(args.run.folder):
        args.run.folder.mkdir(parents=True, exist_ok=True)
    role = "buffer" if args.service == WEIGHTS else args.service  # it stands beside the buffer and shows its certificate
    credentials = auth_credentials.of(args.run, role, args.tls_dir, args.secret_file)
    objects = args.run.objects
    async with open_store(args.run.objects_url, objects.endpoint, objects.region) as store:
        if args.service in _WRITERS:
            await store.probe()
        context = ServiceContext(args, lifecycle, clock, store, credentials)
        try:
            yield context
        finally:
            await context.close()


def main(service: str, start: Callable[[ServiceContext], Awaitable[None]], argv: Sequence[str] | None = None) -> NoReturn:
    """Run a service process to its end and exit. Called by the __main__ of each service."""
    sys.setswitchinterval(SWITCH_S)
    logs.configure(service, f"{service}-?", "")
    try:
        args = arguments(service, argv)
        logs.configure(service, args.instance, args.run.run.name, content=args.run.security.log_content)
        code = rpc.run(_run(args, start))
    except ConfigError as error:
        _explain(error)
        code = EXIT_CONFIG
    sys.stderr.flush()
    sys.exit(code)


async def _run(args: ServiceArguments, start: Callable[[ServiceContext], Awaitable[None]]) -> int:
    clock = SystemClock()
    lifecycle = Lifecycle(clock)
    lifecycle.stay = args.stay
    _handle_signals(lifecycle)
    async with open_context(args, lifecycle, clock) as context:
        starting = lifecycle.spawn("start", _started(start, context), endless=False)
        lifecycle.on_stop(NOT_SERVING, lambda: _cancel(starting), "start")
        lifecycle.spawn("wait metrics", context.watch_waits())
        return await lifecycle.run()


async def _started(start: Callable[[ServiceContext], Awaitable[None]], context: ServiceContext) -> None:
    """Run a service's start. Bad input here is a matter of configuration: one line."""
    try:
        await start(context)
        long_lived()
    except (ConfigError, InvalidInput) as error:
        if os.environ.get(DEBUG):
            log.exception("start failed", error=error)
        raise ConfigError(error.message, error.reason) from error


def long_lived() -> None:
    """Tell the garbage collector that what exists now stays, and to look for cycles among the rest less often.

    It would walk hundreds of thousands of objects again and again; a step's messages and samples die by reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _handle_signals(lifecycle: Lifecycle) -> None:
    """The first SIGTERM or SIGINT asks to stop. It also restores the default action, so the second one kills at once, even
    in the middle of a long computation: an exit status that is not zero.
    """
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        loop.call_soon_threadsafe(lifecycle.request_stop, signal.Signals(number).name)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    faulthandler.register(signal.SIGUSR1)  # the stacks of all threads, into the log


def _explain(error: SlipstreamError) -> None:
    """One line: plain for a person at a terminal, JSON for a log file. With SLIPSTREAM_DEBUG=1 also the traceback."""
    if os.environ.get(DEBUG):
        log.exception("configuration", error=error)
    elif sys.stderr.isatty():
        sys.stderr.write(f"error: {error.message}\n")
    else:
        log.error(error.message)


@contextlib.contextmanager
def writable(folder: Path):
    """Turn an OSError in the block into a ConfigError that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run folder {folder} cannot be written ({error.strerror}): set run.folder to another one, or change its owner or "
            "mode") from None


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel("stopping")
    await asyncio.wait([task])


async def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)
