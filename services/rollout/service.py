"""The rollout service: RolloutService over the engine, and the worker that pulls from the buffer."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from services.rollout.concurrency import Concurrency, Drafts
from services.rollout.engine import Engine, Generation, Request
from services.rollout.group import Group
from services.rollout.shared_engine import SharedEngine
from services.rollout.worker import RolloutWorker
from slipstream import environment, rpc
from slipstream.config import RunFile
from slipstream.devices import Devices
from slipstream.errors import ConfigError, InvalidInput
from slipstream.lifecycle import CLOSE
from slipstream.protos.rollout.v1 import group_pb2_grpc, rollout_pb2_grpc
from slipstream.protos.rollout.v1 import rollout_pb2 as pb
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import array, tensor
from slipstream.service import ServiceContext
from slipstream.telemetry import DeviceMetrics, RolloutMetrics


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """slipstream.rollout.v1.RolloutService: proto in and out."""

    def __init__(self, engine: Engine, worker: RolloutWorker) -> None:
        self._engine, self._worker = engine, worker

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        prompt = array(request.prompt, "prompt")
        if prompt.ndim != 1:
            raise InvalidInput(f"prompt has shape {list(prompt.shape)}; [T] is needed", "SHAPE", field="prompt")
        asked = Request(
            prompt, request.max_new_tokens, request.seed, request.temperature, tuple(request.stop_token_ids), request.greedy,
            request.return_routes)
        async with contextlib.aclosing(self._engine.stream(asked)) as pieces:
            async for piece in pieces:
                yield _response(piece)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        finished, handed_back = await self._worker.drain(rpc.seconds(request.grace))
        return pb.DrainResponse(finished=finished, handed_back=handed_back)


async def start(context: ServiceContext) -> None:
    """Open the environments, serve, start the loops. Raises ConfigError for an environment or engine that cannot be used."""
    run, metrics = context.run, RolloutMetrics(context.registry)
    stack = contextlib.AsyncExitStack()
    context.lifecycle.on_stop(CLOSE, stack.aclose, "environments")
    environments = {
        settings.name: await stack.enter_async_context(environment.connect(
            settings, context.waits, context.clock, context.credentials))
        for settings in run.environments}
    nodes = run.rollout.vllm.nodes if run.rollout.engine == "vllm" else 1
    group = Group(nodes, context.waits) if nodes > 1 else None
    engine = _sharing(context, engine_of(run, metrics.decode_seconds.observe, group))
    worker = RolloutWorker(context, engine, environments, metrics)
    serving: list[rpc.Registration] = [
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(engine, worker)), *worker.weights.serving]
    if group is not None:
        serving.append((group_pb2_grpc.add_GroupServiceServicer_to_server, group))
        context.lifecycle.spawn("group", group.watch())
    await context.serve(serving)
    context.judge_progress(
        lambda: engine.generated_tokens, lambda: f"tokens of {engine.active} sequences in flight" if engine.active else "")
    worker.start()
    context.lifecycle.on_stop(CLOSE, engine.stop, "engine")
    context.lifecycle.spawn("engine metrics", _watch_engine(context, engine, worker, metrics))


def engine_of(
    run: RunFile, observe: Callable[[float], None] | None = None, group: Group | None = None,
) -> Engine:
    """The engine that the run file asks for; only its own packages are imported. `group`: its other nodes, if it has any.

    Raises ConfigError when packages are missing.
    """
    if run.rollout.engine == "vllm":
        _need(run, "vllm", *(("arctic_inference",) if run.rollout.speculation.method == "suffix" else ()))
        from services.rollout.vllm_engine import VllmEngine

        return VllmEngine(run, observe, group)
    _need(run, "torch", "transformers")
    from services.rollout.torch_engine import TorchEngine

    return TorchEngine(run, observe)


def _sharing(context: ServiceContext, engine: Engine) -> Engine:
    """The engine, taking turns with the trainer where they share devices."""
    if context.run.run.placement == "split":
        return engine
    stopping, metrics = context.lifecycle.stopping, DeviceMetrics(context.registry)
    shared = SharedEngine(engine, Devices(context.run.folder, context.waits, context.clock, metrics, stopping))
    context.lifecycle.spawn("turns on the devices", shared.take_turns())
    return shared


def _need(run: RunFile, *packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"rollout.engine = {run.rollout.engine!r}: {sys.executable} has no package {package}; start the worker with "
                "the interpreter of an environment that has it, see docs/guides/engines.md")


async def _watch_engine(
    context: ServiceContext, engine: Engine, worker: RolloutWorker, metrics: RolloutMetrics
) -> None:
    """Keep tokens and slots up to date for metrics and status, and the bound on samples in hand where a cache binds."""
    counted, preempted, judged, bound = 0, 0, Drafts(), Concurrency(context.run.rollout.slots)
    while True:
        await context.clock.sleep(0.5)
        generated = engine.generated_tokens
        metrics.generated_tokens.inc(max(0, generated - counted))
        metrics.active_slots.set(engine.active)
        counted = generated
        if (load := engine.load) is not None:
            metrics.kv_cache_share.set(load.cache_share)
            metrics.engine_waiting.set(load.waiting)
            metrics.preemptions.inc(max(0, load.preemptions - preempted))
            preempted = load.preemptions
            metrics.drafts.inc(load.drafts.made - judged.made)
            metrics.draft_tokens.inc(load.drafts.tokens - judged.tokens)
            metrics.accepted_tokens.inc(load.drafts.accepted - judged.accepted)
            judged = load.drafts
            if context.run.rollout.adaptive_slots:
                worker.bound(bound.look(load, worker.in_hand))


def _response(piece: Generation) -> pb.GenerateResponse:
    response = pb.GenerateResponse(tokens=tensor(piece.tokens), logprobs=tensor(piece.logprobs))
    response.finish_reason = piece.finish_reason  # pyright: ignore[reportAttributeAccessIssue]
    for span in piece.spans:
        response.versions.add(version=span.version, step=span.step, incarnation=span.incarnation, length=span.length)
    if piece.routes is not None:
        wire = tensor(piece.routes)
        response.routes.CopyFrom(sample_pb2.Routes(dtype=wire.dtype, shape=wire.shape, data=wire.data))
    return response
