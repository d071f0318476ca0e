"""Two fronts of two releases at one ledger, as during the upgrade of the buffer: whoever is asked, the walk is one.

The other release is SLIPSTREAM_PREVIOUS, or the last one. `make test-upgrade` runs this.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.faults.releases import LAST, NoRelease, former, unpack
from services.buffer.connection import connect
from services.buffer.ledger import Rules
from services.buffer.redis_ledger import RedisLedger
from slipstream import rpc
from slipstream.config import parse
from slipstream.protos.buffer.v1 import batches_pb2_grpc, policy_pb2_grpc, samples_pb2_grpc, scores_pb2_grpc, sessions_pb2_grpc
from tests.buffer_client import Client, finished
from tests.e2e.test_kills import wait_until
from tests.redis_server import RedisProcess

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@contextlib.asynccontextmanager
async def front(tree: Path, run_file: Path, name: str, redis: RedisProcess) -> AsyncIterator[Client]:
    """A buffer process from these files, and stubs on it."""
    folder = Path(json.loads(run_file.read_text())["run"]["folder"])
    process = subprocess.Popen(  # noqa: ASYNC220 - a start, once
        [sys.executable, "-m", "services.buffer", "--run-file", str(run_file), "--redis", redis.url, "--instance", name],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stderr=(folder.parent / f"{name}.log").open("w"))
    try:
        service = folder / "services" / f"{name}.json"
        wait_until(lambda: service.exists() or process.poll() is not None)
        assert process.poll() is None, (folder.parent / f"{name}.log").read_text()
        async with rpc.channel(json.loads(service.read_text())["address"]) as channel:
            yield Client(
                None, samples_pb2_grpc.SampleServiceStub(channel), scores_pb2_grpc.ScoreServiceStub(channel),
                batches_pb2_grpc.BatchServiceStub(channel), policy_pb2_grpc.PolicyServiceStub(channel),
                sessions_pb2_grpc.SessionServiceStub(channel))
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(180)
async def test_fronts_of_two_releases_share_a_ledger(redis: RedisProcess, tmp_path: Path) -> None:
    """Leased here, handed in there, numbered here, read there: each step crosses between the releases, in both directions."""
    try:
        previous = os.environ.get("SLIPSTREAM_PREVIOUS", LAST)
        tree = unpack(former("" if previous == LAST else previous), tmp_path / "former")
    except NoRelease as error:
        pytest.skip(str(error))
    settings = {
        "run": {"name": "two", "folder": str(tmp_path / "run"), "steps": 20}, "model": {"path": "m"},
        "environments": [{"name": "sort", "entry": "slipstream.environments.sort_digits:SortDigits"}],
        "schedule": {"groups_per_batch": 2, "group_size": 2, "max_lag": 1}, "buffer": {"durability": "memory"}}
    run_file = tmp_path / "run-file.json"
    run_file.write_text(json.dumps(settings))
    async with front(tree, run_file, "former", redis) as old, front(ROOT, run_file, "new", redis) as new:
        await old.begin()
        new.incarnation = old.incarnation
        for k in range(1, STEPS + 1):
            one, other = (old, new) if k % 2 else (new, old)
            done = [finished(lease, k - 1) for lease in (await one.lease()).leases]
            assert not any(result.status.code for result in (await other.submit(*done)).results)
            scored = 0
            while scored < len(done):
                scored += await one.score_all()
            batch = (await other.batch(k)).batch
            bodies = await one.read(k)
            assert bodies == await other.read(k) and len(bodies) == sum(len(g.members) for g in batch.groups)
            assert {(d.lease.sample.draw.number, d.lease.sample.index): d.body for d in done}.items() >= bodies.items() or k > 1
            await one.publish(k)
        assert await old.commit(STEPS - 1) == STEPS - 1 and await new.commit(STEPS) == STEPS
        client = connect(redis.url)
        balance = await RedisLedger(client, Rules.of(parse(settings))).balance()
        await client.aclose()
        balance.check(2)
        assert balance.groups["committed"] == 2 * STEPS
