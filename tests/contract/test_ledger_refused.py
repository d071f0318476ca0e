"""A server that takes no command just now is away, not broken: callers are told to come back, and then all goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import RedisError

from services.buffer.connection import connect
from slipstream.errors import Unavailable
from tests.contract.ledger_bench import Bench, grant

STATES = ["a script that takes too long", "a failover", "too few replicas"]


@asynccontextmanager
async def refusing(admin: Any, state: str) -> AsyncIterator[None]:
    """The server answers BUSY, READONLY or NOREPLICAS inside."""
    if state == "a failover":
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        yield
        await admin.execute_command("REPLICAOF", "NO", "ONE")
    elif state == "too few replicas":
        await admin.config_set("min-replicas-to-write", 1)
        yield
        await admin.config_set("min-replicas-to-write", 0)
    else:
        await admin.config_set("busy-reply-threshold", 1)
        endless = asyncio.create_task(admin.eval("while true do end", 0))
        await asyncio.sleep(0.1)
        yield
        await admin.script_kill()
        with pytest.raises(RedisError):
            await endless
        await admin.config_set("busy-reply-threshold", 5000)


@pytest.mark.parametrize("state", STATES)
async def test_what_passes_is_told_as_unavailable(bench: Bench, state: str) -> None:
    """With a time to come back after. Nothing was executed; plain commands, which only read, meet a busy server alone."""
    if bench.kind == "memory":
        return  # the model has no server
    ledger = await bench.start()
    calls = [lambda: ledger.grant_samples("w", 2), *([ledger.archive] if state == STATES[0] else [])]
    admin = connect(bench.admin_url)
    async with refusing(admin, state):
        for call in calls:
            with pytest.raises(Unavailable) as told:
                await call()
            assert told.value.reason == "REDIS" and told.value.retry_s, told.value.message
    await admin.aclose()
    assert [g.lease.attempt for g in await grant(ledger, 2)] == [1, 1]
