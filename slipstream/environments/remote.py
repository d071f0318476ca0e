"""The client of an environment served over gRPC.

consumes: lists of EpisodeReset and EpisodeStep        produces: one value or error per item, in order
waits for: the server                                  unblocked by: its answer, the deadline of the call (step_timeout_s), or,
                                                       while nothing listens, its return: tried for ever, named in `waits`
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from slipstream import config, logs, rpc, tracing
from slipstream.auth_credentials import Credentials
from slipstream.environment import Description, EpisodeReset, EpisodeStep, Reset, Step
from slipstream.environments import wire
from slipstream.environments.episodes import timed_out
from slipstream.errors import ConfigError, SlipstreamError, Unavailable
from slipstream.lifecycle import Clock, SystemClock, Waits
from slipstream.protos.environment.v1 import environment_pb2 as pb
from slipstream.protos.environment.v1.environment_pb2_grpc import EnvironmentServiceStub

START_S = 10.0  # an environment may be this late at the start of a run
GRACE_S = 1.0  # the server answers this long before the deadline, with a time-out for each item that is not ready
CONTRACT = "v1"
BACKOFF_S, BACKOFF_MOST_S = 0.05, 2.0

R = TypeVar("R")
log = logs.get("environment")


class RemoteEnvironment:
    """An environment at `settings.address`. Unavailable servers are waited for; a call over its deadline fails its items."""

    def __init__(
        self, settings: config.Environment, waits: Waits | None = None, clock: Clock | None = None, start_s: float = START_S,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials if credentials is not None and credentials.secure and not settings.insecure else None
        if self._credentials is None and not rpc.is_loopback(settings.address):
            if not settings.insecure:
                raise ConfigError(
                    f"environment {settings.name}: address = {settings.address!r} is not loopback and would be plaintext; "
                    "set insecure = true if you trust the network between, or security.tls_dir to a folder with certificates")
            log.warning("plaintext to an environment that is not on this machine", environment=settings.name,
                        address=settings.address)
        self._settings = settings
        self._clock = clock or SystemClock()
        self._waits = waits or Waits(self._clock)
        self._start_s = start_s
        self._channel: grpc.aio.Channel | None = None
        self._description = Description(settings.name)

    @property
    def description(self) -> Description:
        return self._description

    async def reset(self, episodes: Sequence[EpisodeReset]) -> list[Reset | SlipstreamError]:
        request = wire.reset_request(episodes, self._settings.name)
        response = await self._call(self._stub.Reset, request, "reset", [e.episode for e in episodes])
        if isinstance(response, list):
            return response
        results = wire.reset_results(response, len(episodes))
        for result in results:
            if isinstance(result, Reset):
                result.scorer = self._settings.scorer or result.scorer or self._description.scorer
        return results

    async def step(self, steps: Sequence[EpisodeStep]) -> list[Step | SlipstreamError]:
        response = await self._call(self._stub.Step, wire.step_request(steps), "step", [s.episode for s in steps])
        return response if isinstance(response, list) else wire.step_results(response, len(steps))

    async def close(self, episodes: Sequence[str]) -> None:
        """One try: an episode that is not closed is forgotten by the server when idle."""
        try:
            await rpc.call(self._stub.Close, pb.CloseRequest(episodes=episodes), self._settings.step_timeout_s)
        except SlipstreamError as error:
            log.warning("episodes could not be closed", environment=self._settings.name, episodes=len(episodes),
                        error=error.message)

    async def __aenter__(self) -> Self:
        settings = self._settings
        self._channel = rpc.channel(
            settings.address, credentials=self._credentials, peer="environment", insecure=settings.insecure)
        self._stub = EnvironmentServiceStub(self._channel)
        try:
            wire_description = await rpc.call_until(
                self._stub.Describe, pb.DescribeRequest(), self._start_s, self._waits,
                f"environment {settings.name} at {settings.address}", self._clock, give_up_s=self._start_s)
        except SlipstreamError as error:
            await self._channel.close()
            raise ConfigError(
                f"environment {settings.name}: no environment answers at environments.address = {settings.address!r} "
                f"({error.message.splitlines()[0] if error.message else error.reason}); "
                "start it with `slipstream env serve module:Class --port N`, or correct the address") from None
        if wire_description.contract not in ("", CONTRACT):
            await self._channel.close()
            raise ConfigError(
                f"environment {settings.name} at {settings.address} speaks contract {wire_description.contract!r}, "
                f"not {CONTRACT!r}: serve it with a version of slipstream that matches this one")
        self._description = Description(
            settings.name, wire_description.tasks, settings.scorer or wire_description.scorer, wire_description.max_episodes)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _call(
        self, method: Callable[..., Awaitable[R]], request: Any, kind: str, episodes: Sequence[str],
    ) -> R | list[Any]:
        """The response, or one error per episode when the call as a whole failed for good. Repeats are safe by sequence."""
        settings, backoff_s = self._settings, BACKOFF_S
        with self._waits.on(f"environment {settings.name}: {kind} of {len(episodes)} episodes") as wait:
            while True:
                try:
                    return await rpc.call(tracing.carrying(method), request, settings.step_timeout_s + GRACE_S)
                except Unavailable as error:
                    if error.reason == "DEADLINE_EXCEEDED":
                        return [timed_out(settings.name, e, kind, settings.step_timeout_s) for e in episodes]
                    wait.sentence = f"environment {settings.name} at {settings.address}: {error.message}"
                    pause_s = backoff_s * random.random() + (error.retry_s or 0)
                except SlipstreamError as error:
                    return [error] * len(episodes)
                await self._clock.sleep(pause_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MOST_S)
