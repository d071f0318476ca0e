"""The ledgers of the contract suite: the in-memory model, and Redis on every server of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from services.buffer.connection import connect
from tests.contract.ledger_bench import Bench
from tests.redis_server import SERVERS, RedisProcess, redis_process

Started = Callable[[str], RedisProcess]


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Name of a server -> its process, started when it is first asked for."""
    processes: dict[str, RedisProcess] = {}
    with ExitStack() as stack:
        def start(name: str) -> RedisProcess:
            if name not in processes:
                folder = tmp_path_factory.mktemp(name)
                processes[name] = stack.enter_context(redis_process(folder, server=SERVERS[name]))
            return processes[name]
        yield start


@pytest.fixture(params=["memory", *(name for name, server in SERVERS.items() if server.binary)])
async def bench(request: pytest.FixtureRequest, started: Started) -> AsyncIterator[Bench]:
    """An empty ledger of each kind."""
    if request.param == "memory":
        yield Bench("memory", "")
        return
    process = started(request.param)
    admin = connect(process.admin_url)
    await admin.flushall()
    bench = Bench(request.param, process.url, process.admin_url)
    yield bench
    for client in [admin, *bench.clients]:
        await client.aclose()
