"""Clients of an environment: in this process for `entry`, over gRPC for `address`; the same lists in and out.

A result is a value or a SlipstreamError. What a caller does with an error by its kind: Unavailable (also Exhausted: too many
episodes) → the same call again later; NotFound → start the episode afresh under a new id; anything else → the episode failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from slipstream import config
from slipstream.auth_credentials import Credentials
from slipstream.environment import Description, EpisodeReset, EpisodeStep, Reset, Step, load
from slipstream.environments.episodes import Episodes
from slipstream.environments.remote import RemoteEnvironment
from slipstream.errors import SlipstreamError
from slipstream.lifecycle import Clock, Waits


class EnvironmentClient(Protocol):
    """Batch access to one environment. Open with `async with`; entering raises ConfigError when there is no environment."""

    @property
    def description(self) -> Description:
        """What the environment offers; known after entering."""
        ...

    async def reset(self, episodes: Sequence[EpisodeReset]) -> list[Reset | SlipstreamError]:
        """Start episodes; results in order. `Reset.scorer` is final: run file over task over environment; empty = rewards."""
        ...

    async def step(self, steps: Sequence[EpisodeStep]) -> list[Step | SlipstreamError]:
        """Answer actions; results in order. Repeating a step is safe."""
        ...

    async def close(self, episodes: Sequence[str]) -> None:
        """Forget episodes; unknown ones are fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None: ...


class LocalEnvironment:
    """An environment in this process."""

    def __init__(self, settings: config.Environment) -> None:
        self._settings = settings
        self._episodes = Episodes(load(settings.entry, settings.args), settings.name)

    @property
    def description(self) -> Description:
        return resolved(self._episodes.description, self._settings)

    async def reset(self, episodes: Sequence[EpisodeReset]) -> list[Reset | SlipstreamError]:
        results = await self._episodes.reset(episodes, self._settings.step_timeout_s)
        scorer = self.description.scorer
        for result in results:
            if isinstance(result, Reset):
                result.scorer = self._settings.scorer or result.scorer or scorer
        return results

    async def step(self, steps: Sequence[EpisodeStep]) -> list[Step | SlipstreamError]:
        return await self._episodes.step(steps, self._settings.step_timeout_s)

    async def close(self, episodes: Sequence[str]) -> None:
        self._episodes.close(episodes)

    async def __aenter__(self) -> Self:
        await self._episodes.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._episodes.stop()


def resolved(description: Description, settings: config.Environment) -> Description:
    """The description under the run file's name and scorer."""
    return Description(settings.name, description.tasks, settings.scorer or description.scorer, description.max_episodes)


def open_client(
    settings: config.Environment, waits: Waits | None = None, clock: Clock | None = None,
    credentials: Credentials | None = None,
) -> EnvironmentClient:
    """The client for `settings`; see slipstream.environment.connect."""
    return LocalEnvironment(settings) if settings.entry else RemoteEnvironment(settings, waits, clock, credentials=credentials)
