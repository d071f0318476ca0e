"""EnvironmentService for any Environment: proto in and out, health, reflection, status.

consumes: lists of resets and steps        produces: one status and observation per item
waits for: user code                       unblocked by: its return, or GRACE_S before the caller's deadline

With certificates only the services of a run and the person who runs it may call; without, calls are plaintext and carry
no token: whoever reaches the address may call, so an address off loopback has to be meant (`insecure`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any, Self

import grpc
from prometheus_client import CollectorRegistry

from slipstream import logs, rpc, telemetry, tracing
from slipstream.auth_credentials import Credentials
from slipstream.environment import Environment
from slipstream.environments import wire
from slipstream.environments.episodes import IDLE_S, Episodes
from slipstream.environments.remote import CONTRACT, GRACE_S
from slipstream.errors import ConfigError, InvalidInput
from slipstream.lifecycle import Clock, SystemClock
from slipstream.protos.environment.v1 import environment_pb2 as pb
from slipstream.protos.environment.v1 import environment_pb2_grpc
from slipstream.protos.types.v1 import status_pb2, status_pb2_grpc

MOST_S = 3600.0  # for callers without a deadline
log = logs.get("environment")


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """slipstream.environment.v1.EnvironmentService over Episodes."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        d = self._episodes.description
        return pb.DescribeResponse(
            name=d.name, tasks=d.tasks, max_episodes=d.max_episodes, scorer=d.scorer, contract=CONTRACT)

    async def Reset(self, request: pb.ResetRequest, context: Any) -> pb.ResetResponse:
        items = wire.resets(request)
        if nameless := [i for i, item in enumerate(items) if not item.episode]:
            raise InvalidInput(f"episodes[{nameless[0]}].episode is empty; choose a unique id", "EPISODE", field="episode")
        with tracing.received(context):
            return wire.reset_response(await self._episodes.reset(items, _time_limit(context)))

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        with tracing.received(context):
            return wire.step_response(await self._episodes.step(wire.steps(request), _time_limit(context)))

    async def Close(self, request: pb.CloseRequest, context: Any) -> pb.CloseResponse:
        self._episodes.close(request.episodes)
        return pb.CloseResponse()


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """What this environment does."""

    def __init__(self, episodes: Episodes, clock: Clock) -> None:
        self._episodes, self._clock = episodes, clock
        self._started = clock.monotonic()

    async def GetStatus(self, request: status_pb2.GetStatusRequest, context: Any) -> status_pb2.GetStatusResponse:
        episodes = self._episodes
        return status_pb2.GetStatusResponse(
            service="environment", instance=episodes.name, state="serving",
            uptime=rpc.duration(self._clock.monotonic() - self._started),
            figures={
                "episodes_open": len(episodes), "episodes_started": episodes.started, "episodes_failed": episodes.failed})


class EnvironmentServer:
    """A served environment. `async with` starts it (ConfigError when it cannot) and stops it; `.address` is host:port."""

    def __init__(
        self, environment: Environment, host: str = "127.0.0.1", port: int = 0, name: str = "", idle_s: float = IDLE_S,
        clock: Clock | None = None, credentials: Credentials | None = None, health_port: int = 0, metrics_port: int = 0,
        insecure: bool = False,
    ) -> None:
        """`health_port`: health in plaintext, for probes; `metrics_port`: Prometheus. 0 = none of either.

        Raises ConfigError for a host that is not loopback without certificates, unless it is meant to be `insecure`.
        """
        clock = clock or SystemClock()
        self.episodes = Episodes(environment, name, idle_s, clock.monotonic)
        if not (credentials is not None and credentials.secure) and not rpc.is_loopback(f"{host}:{port}"):
            if not insecure:
                raise ConfigError(
                    f"--host {host} is not loopback and would be plaintext for everybody who reaches it: pass --tls-dir with a "
                    "folder of certificates, --host 127.0.0.1, or --insecure if you trust the network")
            log.warning("plaintext and open to everybody who reaches this address; let only the network that you trust in",
                        host=host)
        self._server = rpc.Server(host, port, [
            (environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, EnvironmentServicer(self.episodes)),
            (status_pb2_grpc.add_StatusServiceServicer_to_server, StatusServicer(self.episodes, clock)),
        ], public=True, credentials=credentials, health_port=health_port, observe=self._metrics(host, metrics_port))

    def _metrics(self, host: str, port: int) -> rpc.Observe | None:
        """Serve metrics on this port; what is to be told of each call."""
        if not port:
            return None
        registry = CollectorRegistry()
        self.episodes.measure(telemetry.EnvironmentMetrics(registry))
        process = telemetry.ProcessMetrics(registry, "environment")
        telemetry.serve(registry, port, host)
        return process.observe_rpc

    @property
    def address(self) -> str:
        return self._server.address

    async def __aenter__(self) -> Self:
        await self.episodes.start()
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.set_serving(False)
        await self._server.stop()
        self.episodes.stop()


def run(
    environment: Environment, host: str = "127.0.0.1", port: int = 0, name: str = "", credentials: Credentials | None = None,
    health_port: int = 0, metrics_port: int = 0, insecure: bool = False, log_content: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C: the calls in flight may end, then the process does. A second signal ends it at once."""

    async def main() -> None:
        stopping, loop = asyncio.Event(), asyncio.get_running_loop()

        def stop() -> None:
            stopping.set()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        async with EnvironmentServer(
                environment, host, port, name, credentials=credentials, health_port=health_port,
                metrics_port=metrics_port, insecure=insecure) as server:
            d = server.episodes.description
            tasks = f"{d.tasks} tasks" if d.tasks else "a task for every index"
            scored = f"scorer {d.scorer}" if d.scorer else "gives rewards itself"
            print(f"environment {d.name} ({tasks}, {scored}) at {server.address}", flush=True)
            await stopping.wait()

    # At a terminal whoever wrote the environment watches: its exceptions say what they say.
    logs.configure(
        "environment", name or type(environment).__name__, "", content=log_content or sys.stderr.isatty(),
        option="--log-content")
    rpc.run(main())


def _time_limit(context: grpc.aio.ServicerContext) -> float:
    """Seconds that user code may take: the caller's deadline, less the time to answer with what is ready."""
    remaining = context.time_remaining()
    if remaining is None or remaining > MOST_S:
        return MOST_S
    return remaining - GRACE_S if remaining > 1.1 * GRACE_S else remaining / 2
