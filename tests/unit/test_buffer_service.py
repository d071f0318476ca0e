"""The buffer over gRPC, on a real Redis: the walk, bad input, restarts of the buffer and of Redis, several fronts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from slipstream import rpc
from slipstream.errors import Fenced, InvalidInput, SlipstreamError, Unavailable
from slipstream.protos.buffer.v1 import policy_pb2, samples_pb2, sessions_pb2
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.buffer_client import buffer, finished
from tests.redis_server import RedisProcess


async def test_the_walk(redis: RedisProcess, tmp_path: Path) -> None:
    """Lease, submit, score, lease the batch, read its bodies, publish, commit: what went in comes out."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted: dict[tuple[int, int], bytes] = {}
        for k in (1, 2, 3):
            submitted |= await client.step(k)
            batch = (await client.batch(k)).batch
            assert [g.draw.number for g in batch.groups] == [2 * k - 2, 2 * k - 1]
            bodies = await client.read(k)
            assert bodies == {(d, i): submitted[d, i] for d in (2 * k - 2, 2 * k - 1) for i in (0, 1)}
            assert len({(g.task.index, g.task.seed) for g in batch.groups}) == 2
            one = batch.groups[1].members[0].sample
            assert await client.read(k, one) == {(one.draw.number, 0): bodies[one.draw.number, 0]}
            await client.publish(k)
        assert await client.commit(3) == 3
        assert len(await client.read(3)) == 4  # the batch log outlives the ledger's rows
        (await client.front.ledger.balance()).check(2)
        archived = "".join(p.read_text() for p in (tmp_path / "objects/ledger").iterdir())
        assert archived.count('"event": "batch"') == 3


async def test_few_bodies_come_with_their_batch(redis: RedisProcess, tmp_path: Path) -> None:
    """In the order of its members and no more than was asked for; from another front, too."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted = await client.step(1)
        batch = (await client.batch(1)).batch
        ids = [(m.sample.draw.number, m.sample.index) for g in batch.groups for m in g.members]
        bodies = {name: submitted[name] for name in ids}
        size = sum(map(len, bodies.values()))
        assert not (await client.batch(1)).bodies
        assert not (await client.batch(1, bodies_up_to_bytes=size - 1)).bodies
        assert list((await client.batch(1, bodies_up_to_bytes=size)).bodies) == list(bodies.values())
    async with buffer(redis, tmp_path / "objects") as client:
        client.incarnation = 1
        again = await client.batch(1, bodies_up_to_bytes=size)
        assert again.batch == batch and list(again.bodies) == list(bodies.values()) and await client.read(1) == bodies


async def test_the_next_number_comes_with_a_publication(redis: RedisProcess, tmp_path: Path) -> None:
    """It is reserved for that step and this incarnation alone, as if it had been asked for."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        number = await client.reserve(1)
        version = PolicyVersion(number=number, step=1, incarnation=1, manifest_key="versions/x")
        published = await rpc.call(
            client.policy.PublishVersion, policy_pb2.PublishVersionRequest(version=version, next_step=2), 5)
        assert published.next_number == number + 1
        with pytest.raises(InvalidInput, match="not reserved"):
            await client.announce(PolicyVersion(number=number + 1, step=3, incarnation=1, manifest_key="versions/y"))
        await client.announce(PolicyVersion(number=number + 1, step=2, incarnation=1, manifest_key="versions/y"))
        assert await client.reserve(3) == number + 2, "none is reserved unless it is asked for"


async def test_each_bad_item_is_refused_alone(redis: RedisProcess, tmp_path: Path) -> None:
    """Statuses are per item, in order; the rest of the list is stored."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        good, bad = [finished(lease) for lease in (await client.lease(2)).leases]
        bad.crc32c += 1
        results = (await client.submit(bad, good)).results
        assert [r.status.code for r in results] == [code_pb2.INVALID_ARGUMENT, code_pb2.OK]
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_UNSPECIFIED, samples_pb2.OUTCOME_ACCEPTED]
        assert client.front.metrics.rejected.labels("CRC")._value.get() == 1


async def test_requests_that_cannot_be_served_say_why(redis: RedisProcess, tmp_path: Path) -> None:
    async with buffer(redis, tmp_path / "objects") as client:
        assert "trainer has not published" in (await client.lease(1, wait_s=0)).waiting_for
        await client.begin()
        with pytest.raises(Fenced, match="run file"):
            await client.lease(1, run_file_hash="0" * 64)
        with pytest.raises(SlipstreamError, match="max_samples"):
            await client.lease(0)
        with pytest.raises(grpc.aio.AioRpcError, match="lease it first"):
            await client.read(1)
        with pytest.raises(SlipstreamError, match="not served") as error:
            await rpc.call(client.sessions.OpenSession, sessions_pb2.OpenSessionRequest(client="c"), 5)
        assert error.value.code == code_pb2.UNIMPLEMENTED
        await client.lease(3)
        assert (await client.batch(1, wait_s=0)).waiting_for == (
            "batch 1: 2 of 2 groups unfinished, oldest draw 0 leased by rollout-0")


async def test_a_crash_between_numbering_and_logging_is_repaired(redis: RedisProcess, tmp_path: Path) -> None:
    """The composition is durable in Redis; another process writes the batch log from the bodies that are still there."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        submitted = await client.step(1)
        assert (await client.front.ledger.number_batch(1, 1)).numbered  # and now the process is gone
    async with buffer(redis, tmp_path / "objects") as client:
        client.incarnation = 1
        assert (await client.batch(1)).batch.ledger_sequence > 0
        bodies = await client.read(1)
        assert len(bodies) == 4 and bodies.items() <= submitted.items()


async def test_redis_goes_and_comes_back(redis: RedisProcess, tmp_path: Path) -> None:
    """Calls are UNAVAILABLE with a retry delay, the process stays up, and nothing that was acknowledged is gone."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        leases = (await client.lease(4)).leases
        await client.submit(finished(leases[0]))
        redis.kill()
        with pytest.raises(Unavailable) as error:
            await client.submit(finished(leases[1]))
        assert error.value.retry_s is not None
        redis.start()
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(Unavailable):
                results = (await client.submit(*[finished(lease) for lease in leases])).results
                break
            assert time.monotonic() < deadline
        assert [r.outcome for r in results] == [samples_pb2.OUTCOME_ACCEPTED] * 4
        assert await client.score_all() == 4
        assert (await client.batch(1)).HasField("batch")


async def test_a_look_at_the_versions_never_hides_a_publication(
        redis: RedisProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is being read when a version is published: what was read before that is thrown away."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        front, read, published = client.front, client.front.ledger.versions, asyncio.Event()

        async def slowly() -> Any:
            versions = await read()
            await published.wait()
            return versions

        monkeypatch.setattr(front.ledger, "versions", slowly)
        looking = asyncio.create_task(front.refresh_versions(force=True))
        await asyncio.sleep(0.05)
        await client.publish(1)
        published.set()
        await looking
        assert front.newest.step == 1


async def test_two_fronts_serve_one_ledger(redis: RedisProcess, tmp_path: Path) -> None:
    """A worker that waits at one front is woken by a publication at another; a watch there sees it too."""
    async with buffer(redis, tmp_path / "objects") as one, buffer(redis, tmp_path / "objects") as two:
        waiting = asyncio.create_task(two.lease(100))
        watch = two.policy.WatchVersions(policy_pb2.WatchVersionsRequest())
        await one.begin()
        watched = asyncio.create_task(two.front.refresh_versions(force=True))
        leases = (await waiting).leases
        await watched
        assert (await watch.read()).version.step == 0
        watch.cancel()
        assert len(leases) == 8
        await one.submit(*[finished(lease) for lease in leases[:4]])
        await two.score_all()
        assert len((await one.batch(1)).batch.groups) == 2
        await one.publish(1)
        assert {lease.lease.sample.draw.number for lease in (await two.lease()).leases} == {4, 5}
