"""A real buffer process on a real Redis, started for a benchmark, with a client that plays worker and trainer.

    async with served(folder, run) as buffer:
        await buffer.client.begin()
        leases = await buffer.client.lease(count)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost import process_cpu_s
from slipstream import rpc, sample, sample_stream
from slipstream.cli import embedded_redis
from slipstream.config import RunFile, parse
from slipstream.protos.buffer.v1 import batches_pb2_grpc, policy_pb2_grpc, samples_pb2, samples_pb2_grpc
from slipstream.service_command import launch_environment
from tests.buffer_client import Client

READY_S = 20.0


@dataclass
class ServedBuffer:
    """The processes and their client. `redis_url` is for direct comparisons on the same server."""

    client: Client
    stream: Any  # StreamSamples, see slipstream.sample_stream
    address: str
    redis_url: str
    buffer_pid: int
    redis_pid: int

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far of the buffer and of Redis."""
        return process_cpu_s(self.buffer_pid), process_cpu_s(self.redis_pid)


def run_of(groups: int, group_size: int, max_lag: int, durability: str = "memory", tokens: int = 1 << 14) -> RunFile:
    """A run of procedural tasks without end whose samples bring their reward."""
    return parse({
        "run": {"name": "bench", "steps": 1_000_000_000}, "model": {"path": "none"},
        "environments": [{"name": "sort", "entry": "slipstream.environments.sort_digits:SortDigits"}],
        "schedule": {"groups_per_batch": groups, "group_size": group_size, "max_lag": max_lag},
        "trainer": {"checkpoint_every": 1},
        "rollout": {"context": tokens, "lease_s": 60, "heartbeat_s": 15},
        "buffer": {"durability": durability, "quota_bytes": 8 << 30}})


def _die_with_parent() -> None:
    """In the child: a benchmark that is killed leaves nothing behind (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[int]:
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **launch_environment()}, preexec_fn=_die_with_parent)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def redis_server(folder: Path, durability: str) -> AsyncIterator[tuple[str, int]]:
    """URL and process id of a Redis that keeps its data in `folder`."""
    folder.mkdir(parents=True)
    socket = embedded_redis.socket_path(folder)
    command = embedded_redis.command(embedded_redis.binary(), socket, folder, durability)
    with _process(command, folder / "redis.log") as pid:
        await embedded_redis.wait_ready(socket, READY_S)
        yield f"unix://{socket}", pid


def _address(found: Path) -> str:
    """Address in the file that a service writes once it serves. Raises TimeoutError."""
    deadline = time.monotonic() + READY_S
    while not found.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the buffer did not write {found} within {READY_S:g} s; its log is beside it")
        time.sleep(0.02)
    return json.loads(found.read_text())["address"]


@contextlib.asynccontextmanager
async def served(folder: Path, run: RunFile) -> AsyncIterator[ServedBuffer]:
    """The buffer of this run; everything is killed at the end."""
    data = run.model_dump(mode="json")
    data["run"]["folder"] = str(folder)
    async with redis_server(folder / "redis", run.buffer.durability) as (url, redis_pid):
        run_file, found = folder / "run.json", folder / "services" / "buffer.json"
        run_file.write_text(json.dumps(data))
        command = [sys.executable, "-m", "services.buffer", "--run-file", str(run_file), "--instance", "buffer", "--redis", url]
        with _process(command, folder / "buffer.log") as pid:
            address = await asyncio.to_thread(_address, found)
            channel = rpc.channel(address)
            client = Client(
                None, samples_pb2_grpc.SampleServiceStub(channel), None, batches_pb2_grpc.BatchServiceStub(channel),
                policy_pb2_grpc.PolicyServiceStub(channel), None)
            yield ServedBuffer(client, sample_stream.method(channel), address, url, pid, redis_pid)
            await channel.close()


@dataclass(frozen=True)
class Body:
    """An encoded sample with what its submit says about it."""

    data: bytes
    crc32c: int
    tokens: int
    step: int


def body_of(tokens: int, step: int = 0) -> Body:
    """A sample of one prompt token and `tokens` - 1 generated by the version of `step`: about 8 bytes per token."""
    rng = np.random.default_rng(tokens)
    segment = sample.Segment(
        rng.integers(0, 150_000, tokens).astype(np.int32), np.arange(tokens) >= 1,
        -rng.exponential(0.5, tokens - 1).astype(np.float32), (sample.Span(step + 1, step, 1, tokens - 1),))
    data = sample.encode(sample.Sample([segment]))
    return Body(data, sample.crc32c(data), tokens, step)


def finished(lease: samples_pb2.SampleLease, body: Body) -> samples_pb2.SubmittedSample:
    """What a worker hands in for a lease: this body, and a reward from the environment."""
    submitted = handed(lease, body).sample
    submitted.body = body.data
    return submitted


def handed(lease: samples_pb2.SampleLease, body: Body) -> sample_stream.Handed:
    """The same for a stream."""
    submitted = samples_pb2.SubmittedSample(
        lease=lease.lease, crc32c=body.crc32c, tokens=body.tokens, generated_tokens=body.tokens - 1,
        oldest_step=body.step, newest_step=body.step)
    submitted.score.scalar = 1.0
    return sample_stream.Handed(submitted, body.data)
