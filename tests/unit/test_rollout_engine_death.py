"""The engine dies while samples are in flight: what the worker says, and what becomes of the samples."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.rollout import torch_engine
from services.rollout.service import start
from slipstream import rpc
from slipstream.errors import Unavailable
from slipstream.lifecycle import EXIT_ERROR, Lifecycle, SystemClock
from slipstream.protos.buffer.v1 import policy_pb2_grpc, samples_pb2_grpc
from slipstream.service import open_context
from slipstream.service_command import ServiceArguments
from tests.scripted_buffer import ScriptedBuffer, published, turns


async def test_a_dead_engine_ends_the_worker_and_not_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process stops serving and exits non-zero, to be restarted. No sample is handed in as failed: it was not the task that
    broke. The leases come back at once, and another worker gets them."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    buffer, run = ScriptedBuffer(), turns(tmp_path)
    await published(run, buffer, 1, 0)
    registrations = [
        (samples_pb2_grpc.add_SampleServiceServicer_to_server, buffer),
        (policy_pb2_grpc.add_PolicyServiceServicer_to_server, buffer)]
    async with rpc.Server("127.0.0.1", 0, registrations, grace_s=0) as server:
        lifecycle = Lifecycle(SystemClock(), 20)
        arguments = ServiceArguments(run, "rollout", "rollout-0", server.address)
        async with open_context(arguments, lifecycle, lifecycle.clock) as context:
            await start(context)
            running = asyncio.create_task(lifecycle.run())
            await buffer.grant(3, 4, 5)
            await buffer.until(lambda: len(buffer.submitted) == 3)
            monkeypatch.setattr(torch_engine.Decoder, "step", lambda self: 1 / 0)
            await buffer.grant(10, 11, 12)
            async with asyncio.timeout(30):
                assert await running == EXIT_ERROR
    assert isinstance(lifecycle.error, Unavailable) and "division by zero" in lifecycle.error.message
    assert sorted(buffer.submitted) == [3, 4, 5]
    assert sorted(buffer.released) == [10, 11, 12]
