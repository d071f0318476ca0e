"""What a finished run left in its ledger: read from the files of the embedded Redis, by a server of our own."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.buffer.ledger import Rules
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream.cli import embedded_redis
from slipstream.cli.run_folder import RunFolder
from slipstream.config import RunFile

READY_S = 30.0


@dataclass
class Remains:
    """`adds_up` is empty when every draw and every sample is accounted for, else what is wrong."""

    bytes: int
    open_leases: int
    epoch: int
    open_draws: list[int]
    adds_up: str
    counters: dict[str, Any] = field(default_factory=dict)
    dead: list[dict[str, Any]] = field(default_factory=list)  # letters that are not archived yet


async def look(run: RunFile, folder: RunFolder) -> Remains:
    """Start a server on the run's data, read the ledger, stop the server. Raises Unavailable when it does not start."""
    rules = Rules.of(run)
    async with _server(folder.redis, run.buffer.durability) as socket:
        client = connect(f"unix://{socket}")
        try:
            ledger = RedisLedger(client, rules)
            balance = await ledger.balance()
            dead = await ledger.archive()
            key = f"slipstream:{{{run.run.name}}}:"
            leases = sum([await client.zcard(key + name) for name in ("leases", "scoring")])
            draws = [int(draw) for draw in await client.hkeys(key + "groups")]
        finally:
            await client.aclose()
    try:
        balance.check(rules.group_size)
        adds_up = ""
    except AssertionError as error:
        adds_up = str(error)
    meta = dict(balance.meta)
    return Remains(
        bytes=int(meta.get("bytes", 0)) + int(meta.get("reserved", 0)), open_leases=leases, epoch=int(meta.get("epoch", 0)),
        open_draws=draws, adds_up=adds_up, counters=meta, dead=dead)


@asynccontextmanager
async def _server(data: Path, durability: str) -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slipstream-") as place:
        socket = Path(place) / "redis.sock"
        command = embedded_redis.command(embedded_redis.binary(), socket, data, durability)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL)
        try:
            await embedded_redis.wait_ready(socket, READY_S)
            yield socket
        finally:
            process.terminate()
            await process.wait()
