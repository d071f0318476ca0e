"""The buffer process: wires the ledger to the gRPC services. No logic.

Consumes: the calls of rollout, reward and trainer. Produces: leases, batches, version events, the batch log.
Waits for: Redis and the environments' descriptions at start. Unblocked by: their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from services.buffer import spans
from services.buffer.account import LedgerServicer, keep
from services.buffer.archive import archive
from services.buffer.batches import BatchServicer
from services.buffer.connection import connect, ping, shown, verify
from services.buffer.cursor import TaskCursor
from services.buffer.front import Front, forever
from services.buffer.gauges import Gauges
from services.buffer.ledger import Ledger, Rules
from services.buffer.policy import PolicyServicer
from services.buffer.samples import SampleServicer
from services.buffer.scores import ScoreServicer
from services.buffer.sessions import SessionServicer
from services.buffer.wire import add_sample_service
from slipstream import environment, logs
from slipstream.balance import BALANCE_KEY
from slipstream.errors import ConfigError, SlipstreamError, Unavailable
from slipstream.lifecycle import CLOSE, FLUSH, STOP_INTAKE, Clock, SystemClock
from slipstream.objects import ObjectStore
from slipstream.protos.buffer.v1 import (
    batches_pb2_grpc,
    ledger_pb2_grpc,
    policy_pb2_grpc,
    scores_pb2_grpc,
    sessions_pb2_grpc,
)
from slipstream.rpc import Registration
from slipstream.service import ServiceContext
from slipstream.telemetry import BufferMetrics

log = logs.get("buffer")
_SWEEP_S, _GAUGES_S, _RETRY_S = 1.0, 1.0, 0.2


def registrations(front: Front, store: ObjectStore, cursor: TaskCursor, clock: Clock | None = None) -> list[Registration]:
    """The gRPC services of one buffer process."""
    return [
        (add_sample_service, SampleServicer(front, store)),
        (scores_pb2_grpc.add_ScoreServiceServicer_to_server, ScoreServicer(front)),
        (batches_pb2_grpc.add_BatchServiceServicer_to_server, BatchServicer(front, store, cursor)),
        (policy_pb2_grpc.add_PolicyServiceServicer_to_server, PolicyServicer(front)),
        (ledger_pb2_grpc.add_LedgerServiceServicer_to_server, LedgerServicer(front, clock or SystemClock())),
        (sessions_pb2_grpc.add_SessionServiceServicer_to_server, SessionServicer()),
    ]


async def start(context: ServiceContext, describe: Callable[..., Awaitable[Any]] = environment.describe) -> None:
    """Open the ledger, ask the environments for their tasks, serve. Raises ConfigError."""
    run, url = context.run, context.arguments.redis
    if not url:
        raise ConfigError("the buffer needs a Redis: pass --redis URL or set buffer.redis")
    rules, metrics = Rules.of(run), BufferMetrics(context.registry)
    client = connect(url, run.buffer.redis_ca_file)
    context.lifecycle.on_stop(CLOSE, client.aclose, "Redis")
    await _until_ready(context, f"Redis at {shown(url)}", lambda: ping(client, url))
    await verify(client, run.buffer.durability, run.buffer.durability_check, run.run.name, run.buffer.quota_bytes)
    with context.waits.on("the environments' descriptions"):
        found = await asyncio.gather(*(describe(e, context.credentials) for e in run.environments))
    tasks = {settings.name: description.tasks for settings, description in zip(run.environments, found, strict=True)}
    ledger = spans.ledger(
        context.tracer, client, rules, observe=lambda name, seconds: metrics.ledger_seconds.labels(name).observe(seconds))
    await ledger.open(tasks)
    await _serve(context, ledger, metrics, tasks)


async def _serve(context: ServiceContext, ledger: Ledger, metrics: BufferMetrics, tasks: Mapping[str, int]) -> None:
    rules = ledger.rules
    front = Front(ledger, metrics, context.run.hash)
    gauges = Gauges(front, context)
    cursor = TaskCursor(rules.seed, rules.weights, tasks)
    await gauges.update()
    await context.serve(registrations(front, context.store, cursor, context.clock))

    async def close() -> None:
        front.changes.close()

    async def last_state() -> None:
        try:
            await archive(ledger, context.store)
            await keep(front, context.clock, context.store)
        except SlipstreamError as error:
            log.warning(f"the ledger's last state was not written to the store, {BALANCE_KEY} is older: {error.message}")

    context.lifecycle.on_stop(STOP_INTAKE, close, "long polls")
    context.lifecycle.on_stop(FLUSH, last_state, "the ledger's last state")  # after the gRPC server, which ends in this stage
    context.lifecycle.spawn("sweep", forever(_SWEEP_S, ledger.sweep, context.clock.sleep))
    context.lifecycle.spawn("gauges", forever(_GAUGES_S, gauges.update, context.clock.sleep))
    context.lifecycle.spawn(
        "versions", forever(_GAUGES_S, lambda: front.refresh_versions(force=True), context.clock.sleep))


async def _until_ready(context: ServiceContext, what: str, attempt: Callable[[], Awaitable[None]]) -> None:
    """Try until it works: the store may come up after us. Visible as a wait, given up after service.stall_s."""
    started = context.clock.monotonic()
    with context.waits.on(what):
        while True:
            try:
                return await attempt()
            except Unavailable as error:
                if context.clock.monotonic() - started > context.run.service.stall_s:
                    raise ConfigError(f"{error.message}; start it or change buffer.redis") from error
            await context.clock.sleep(_RETRY_S)
