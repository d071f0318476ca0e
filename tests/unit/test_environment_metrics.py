"""What a served environment shows: the time of every call of user code, its failures, and the episodes that are open."""

from __future__ import annotations

import urllib.request

from slipstream import config
from slipstream.environment import Action, Environment, EpisodeReset, EpisodeStep, Reset, Step, Task
from slipstream.environments.remote import RemoteEnvironment
from slipstream.environments.server import EnvironmentServer
from tests.ports import free_port


class Moody(Environment):
    """Fails for odd tasks."""

    def reset(self, task: Task) -> Reset:
        if task.index % 2:
            raise ValueError("odd")
        return Reset("go")

    async def step(self, episode, action) -> Step:
        return Step(done=True, reward=1.0)


def page(port: int) -> dict[str, float]:
    """The series of /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = [line.rpartition(" ") for line in reply.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def test_calls_failures_and_open_episodes_are_counted() -> None:
    """An episode that failed, or is done, is not open: autoscalers would keep replicas for it."""
    port = free_port()
    async with EnvironmentServer(Moody(), metrics_port=port) as server, RemoteEnvironment(
            config.Environment(name="moody", address=server.address)) as client:
        assert page(port)['slipstream_environment_errors_total{call="reset"}'] == 0  # there before the first: see `known`
        await client.reset([EpisodeReset(f"e{n}", Task(n, 0)) for n in range(6)])
        await client.step([EpisodeStep("e0", 1, Action("x"))])
        seen = page(port)
    assert seen["slipstream_environment_episodes"] == 2  # of three that began, one is done
    assert seen['slipstream_environment_errors_total{call="reset"}'] == 3
    assert seen['slipstream_environment_call_seconds_count{call="reset"}'] == 6
    assert seen['slipstream_environment_call_seconds_count{call="step"}'] == 1
