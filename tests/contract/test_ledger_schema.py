"""Fronts of two releases at one ledger: who does not know its schema neither opens it nor goes on serving it, and says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.buffer.connection import connect
from services.buffer.front import forever
from services.buffer.ledger import SCHEMA, Ledger, Version
from slipstream.errors import ConfigError, Unavailable
from tests.buffer_client import buffer, finished
from tests.contract.ledger_bench import Bench, finish, grant
from tests.redis_server import RedisProcess


async def migrate(bench: Bench, schema: int) -> None:
    """What a front of another release does to the ledger."""
    if bench.model:
        bench.model._state.meta["schema"] = schema
    else:
        await bench.clients[-1].hset("slipstream:{contract}:meta", "schema", schema)


@pytest.mark.parametrize(("other", "sentence"), [
    (SCHEMA + 1, rf"schema {SCHEMA + 1}, release \S+ knows {SCHEMA}: a newer release wrote it, use that one"),
    (SCHEMA - 1, rf"schema {SCHEMA - 1}, release \S+ knows {SCHEMA}: an older release wrote it, finish the run with"),
])
async def test_a_front_does_not_open_the_ledger_of_another_schema(bench: Bench, other: int, sentence: str) -> None:
    """A newer one by mistake of an old image, an older one before its run was finished: both are told what to do."""
    await bench.start()
    await migrate(bench, other)
    with pytest.raises(ConfigError, match=sentence):
        await bench.open()


async def test_a_serving_front_is_stopped_by_the_ledger_itself(bench: Bench) -> None:
    """Every call is refused, as something that another front can do, and changes nothing; the old front's loops end it."""
    ledger: Ledger = await bench.start()
    grants = await grant(ledger, 2)
    before = await ledger.balance()
    await migrate(bench, SCHEMA + 1)
    calls = [
        lambda: ledger.grant_samples("w", 1), lambda: finish(ledger, grants), lambda: ledger.grant_scoring("r", 1),
        lambda: ledger.heartbeat_samples([grants[0].lease]), lambda: ledger.number_batch(1, 1), lambda: ledger.commit(1, 0),
        lambda: ledger.take_incarnation(0, 0), lambda: ledger.reserve_version(1, 1), ledger.versions, ledger.sweep,
        lambda: ledger.publish_version(Version(2, 1, 1, "v", 7))]
    for call in calls:
        with pytest.raises(Unavailable, match=rf"schema {SCHEMA + 1} now, this front knows {SCHEMA}") as refused:
            await call()
        assert refused.value.reason == "LEDGER_SCHEMA" and refused.value.retry_s
    with pytest.raises(ConfigError, match="another release has taken it over"):
        await asyncio.wait_for(forever(0.01, ledger.sweep, asyncio.sleep), 5)
    await migrate(bench, SCHEMA)
    assert await ledger.balance() == before


async def test_callers_of_the_old_front_keep_their_work(redis: RedisProcess, tmp_path: Path) -> None:
    """UNAVAILABLE with a delay, as while a front restarts: the worker keeps its sample and hands it to the next front."""
    async with buffer(redis, tmp_path / "objects") as client:
        await client.begin()
        lease = (await client.lease(1)).leases[0]
        admin = connect(redis.url)
        await admin.hset("slipstream:{svc}:meta", "schema", SCHEMA + 1)
        with pytest.raises(Unavailable, match="ask the others"):
            await client.submit(finished(lease))
        assert client.front is not None
        with pytest.raises(ConfigError):
            await asyncio.wait_for(forever(0.01, client.front.ledger.balance, asyncio.sleep), 5)
        await admin.hset("slipstream:{svc}:meta", "schema", SCHEMA)
        await admin.aclose()
        assert not (await client.submit(finished(lease))).results[0].status.code
