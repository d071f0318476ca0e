"""What binds at scale: a thousand simulated workers with ten thousand open episodes on one buffer process.

    python -m benchmarks.workers --json FILE [--workers 1000] [--episodes 10] [--seconds 60] [--durability always]

Each worker keeps an episode open for --episode-s, half as long to half as long again, hands in what has finished and leases as
many again in the next call, and sends a heartbeat for all its leases every 15 s. A trainer numbers, reads, publishes and
commits. No tokens are generated: bodies of --tokens tokens are prepared. The workers live in processes of their own, whose CPU
is not counted. Redis writes to the disk of temporary files. The object store is in memory, as on a cluster it is S3; with
--objects disk it shares the disk of Redis, and every batch that is written there holds up fsyncs. `lease_p99_ms` is the time of
LeaseSamples calls as a client sees it, after the ramp; `cpu_s_per_mtok` is the CPU of the buffer and of Redis per million
trained tokens.

Nine hundred workers share one process, so their calls also wait for each other's turn in its event loop: `client_lag_p99_ms` is
by how much that loop is late. A hundred have another process, which is idle as a real worker is between two calls:
`lease_apart_p99_ms` is of their calls alone. `lease_p99_ms` is of all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import publish
from benchmarks.served_buffer import Body, ServedBuffer, body_of, finished, run_of, served
from slipstream import rpc
from slipstream.protos.buffer.v1 import samples_pb2, samples_pb2_grpc

GROUPS, GROUP_SIZE = 128, 8
HEARTBEAT_S, RAMP_S, GATHER_S = 15.0, 20.0, 1.0
CHANNELS = 16
APART = 10  # one worker of so many lives in the process that is idle
TICK_S = 0.005


@dataclass(frozen=True)
class Fleet:
    """The load. Times in seconds."""

    workers: int = 1000
    episodes: int = 10  # open at a time, per worker
    episode_s: float = 60.0
    tokens: int = 4000
    seconds: float = 60.0
    durability: str = "always"
    objects: str = "memory" if Path("/dev/shm").is_dir() else "disk"


class Worker:
    """One simulated rollout worker."""

    def __init__(self, name: str, stub: Any, fleet: Fleet, bodies: dict[int, Body], times: list[tuple[float, float]]) -> None:
        self.name, self.stub, self.fleet, self.bodies, self.times = name, stub, fleet, bodies, times
        self.ends: list[tuple[float, Any]] = []
        self.random = random.Random(name)
        self.submitted = 0

    async def lease(self, count: int) -> None:
        started = time.monotonic()
        reply = await rpc.call(self.stub.LeaseSamples, samples_pb2.LeaseSamplesRequest(
            worker=self.name, max_samples=count, wait=rpc.duration(0)), 30)
        now = time.monotonic()
        self.times.append((started, now - started))
        shortest = 0.5 if self.submitted else 0.0  # the first ones end spread over time, as they do in the middle of a run
        self.ends += [(now + self.fleet.episode_s * self.random.uniform(shortest, 1.5), lease) for lease in reply.leases]

    async def submit(self, leases: list[Any]) -> None:
        body = self.bodies[max(self.bodies)]
        reply = await rpc.call(self.stub.SubmitSamples, samples_pb2.SubmitSamplesRequest(
            worker=self.name, samples=[finished(lease, body) for lease in leases]), 30)
        assert not any(r.status.code for r in reply.results), reply.results[0]
        self.submitted += len(leases)

    async def live(self, start_s: float) -> None:
        """For ever: submit, lease, heartbeat."""
        await asyncio.sleep(start_s)
        beat = time.monotonic() + self.random.uniform(0, HEARTBEAT_S)
        while True:
            now = time.monotonic()
            done = [lease for end, lease in self.ends if end <= now]
            if done:
                self.ends = [(end, lease) for end, lease in self.ends if end > now]
                await self.submit(done)
            if (missing := self.fleet.episodes - len(self.ends)) > 0:
                await self.lease(missing)
            if now >= beat:
                beat += HEARTBEAT_S
                await rpc.call(self.stub.HeartbeatSamples, samples_pb2.HeartbeatSamplesRequest(
                    worker=self.name, leases=[lease.lease for _, lease in self.ends]), 30)
            after = min([end for end, _ in self.ends] + [beat, time.monotonic() + (GATHER_S if missing > 0 else HEARTBEAT_S)])
            await asyncio.sleep(max(after - time.monotonic(), 0.01))


async def late(lags: list[tuple[float, float]]) -> None:
    """For ever: by how much this event loop is late, in seconds, and when."""
    while True:
        started = time.monotonic()
        await asyncio.sleep(TICK_S)
        lags.append((started, time.monotonic() - started - TICK_S))


async def run_clients(address: str, fleet: Fleet, numbers: range) -> None:
    """A process of clients: reads steps from stdin (a line each), prints what it measured when stdin ends."""
    channels = [rpc.channel(address) for _ in range(CHANNELS)]
    stubs = [samples_pb2_grpc.SampleServiceStub(c) for c in channels]
    bodies, times, lags = {0: body_of(fleet.tokens)}, [], []
    members = [Worker(f"rollout-{i}", stubs[i % CHANNELS], fleet, bodies, times) for i in numbers]
    tasks = [asyncio.create_task(w.live(RAMP_S * i / fleet.workers)) for i, w in zip(numbers, members, strict=True)]
    tasks.append(asyncio.create_task(late(lags)))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        bodies[int(line)] = body_of(fleet.tokens, int(line))
        if failed := next((t for t in tasks if t.done()), None):
            failed.result()
    open_now = sum(len(w.ends) for w in members)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps({"times": times, "lags": lags, "open": open_now}))


async def train(buffer: ServedBuffer, tell: Any, state: dict[str, int]) -> None:
    """Number, read, publish, commit, for ever."""
    batch = 0
    while True:
        batch += 1
        while not (await buffer.client.batch(batch, wait_s=5)).HasField("batch"):
            pass
        async for message in buffer.client.read_messages(batch):
            state["samples"] += len(message.bodies)
        await buffer.client.publish(batch)
        tell(batch)
        await buffer.client.commit(batch)
        state["batch"] = batch


async def measure(fleet: Fleet) -> dict[str, Any]:
    """Start everything, let it ramp, measure, stop."""
    memory = "/dev/shm" if fleet.objects == "memory" else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as objects:
        return await _measure(Path(folder), Path(objects), fleet)


async def _measure(folder: Path, objects: Path, fleet: Fleet) -> dict[str, Any]:
    lag = -(-fleet.workers * fleet.episodes // (GROUPS * GROUP_SIZE)) + 1
    run = run_of(GROUPS, GROUP_SIZE, lag, fleet.durability, tokens=fleet.tokens)
    run = run.model_copy(update={"objects": run.objects.model_copy(update={"url": f"file://{objects}"})})
    state = {"samples": 0, "batch": 0}
    async with served(folder / "scale", run) as buffer:
        await buffer.client.begin()
        apart = fleet.workers // APART
        clients = [_start_clients(buffer.address, fleet, first, last)
                   for first, last in ((apart, fleet.workers), (0, apart)) if first < last]

        def tell(step: int) -> None:
            for process in clients:
                stdin: Any = process.stdin
                stdin.write(f"{step}\n")
                stdin.flush()

        trainer = asyncio.create_task(train(buffer, tell, state))
        try:
            await asyncio.sleep(RAMP_S + 1.5 * fleet.episode_s)
            first, cpu_before, samples_before = time.monotonic(), buffer.cpu_s(), state["samples"]
            await asyncio.wait({trainer}, timeout=fleet.seconds)
            last, cpu_after, samples_after = time.monotonic(), buffer.cpu_s(), state["samples"]
            if trainer.done():
                trainer.result()
            outs = await asyncio.gather(*(asyncio.to_thread(process.communicate, None, 60) for process in clients))
        finally:
            trainer.cancel()
            for process in clients:
                process.kill()
    found = [json.loads(out) for out, _ in outs]
    mtok = (samples_after - samples_before) * fleet.tokens / 1e6
    buffer_s, redis_s = (after - before for after, before in zip(cpu_after, cpu_before, strict=True))

    def ms(name: str, part: Sequence[dict[str, Any]], percent: float) -> float:
        return float(np.percentile([took * 1000 for one in part for at, took in one[name] if first <= at <= last], percent))

    leases = sum(first <= at <= last for one in found for at, _ in one["times"])
    return {
        "lease_p99_ms": ms("times", found, 99), "lease_p50_ms": ms("times", found, 50),
        "lease_apart_p99_ms": ms("times", found[-1:], 99), "lease_apart_p50_ms": ms("times", found[-1:], 50),
        "client_lag_p99_ms": ms("lags", found[:1], 99),
        "leases_per_s": leases / (last - first), "open_episodes": sum(one["open"] for one in found),
        "samples_per_s": (samples_after - samples_before) / (last - first), "batches": state["batch"],
        "cpu_s_per_mtok": (buffer_s + redis_s) / mtok if mtok else float("inf"),
        "buffer_cores": buffer_s / (last - first), "redis_cores": redis_s / (last - first),
        "fleet": json.dumps(asdict(fleet))}


def _start_clients(address: str, fleet: Fleet, first: int, last: int) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "benchmarks.workers", "--clients", address, "--numbers", str(first), str(last),
        *_arguments(fleet)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _arguments(fleet: Fleet) -> list[str]:
    return [part for name, value in asdict(fleet).items() for part in (f"--{name.replace('_', '-')}", str(value))]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Fleet()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--clients", default="", help=argparse.SUPPRESS)
    parser.add_argument("--numbers", type=int, nargs=2, default=(0, 0), help=argparse.SUPPRESS)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    fleet = Fleet(**{name: getattr(arguments, name) for name in asdict(Fleet())})
    if arguments.clients:
        os.nice(1)  # the buffer under test goes first
        return rpc.run(run_clients(arguments.clients, fleet, range(*arguments.numbers)))
    figures = rpc.run(measure(fleet))
    rows = [[name, f"{value:.3f}" if isinstance(value, float) else str(value)] for name, value in figures.items()]
    publish("a thousand workers", ["figure", "value"], rows, figures, arguments.json)


if __name__ == "__main__":
    main()
