"""A served environment tells probes and Prometheus how it is, on ports of their own."""

from __future__ import annotations

import asyncio
import urllib.request

from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream import environment, rpc
from slipstream.environments.server import EnvironmentServer
from slipstream.environments.sort_digits import SortDigits
from tests.ports import free_port


async def test_health_and_open_episodes() -> None:
    health, metrics = free_port(), free_port()
    async with EnvironmentServer(SortDigits(), health_port=health, metrics_port=metrics) as server:
        channel = rpc.channel(f"127.0.0.1:{health}")
        answer = await rpc.call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), 5)
        await channel.close()
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await server.episodes.reset([environment.EpisodeReset("one", environment.Task(0, 0, "sort"))], 5)
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics").read().decode())
    assert "slipstream_environment_episodes 1.0" in text
