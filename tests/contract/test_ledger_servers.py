"""On which servers the ledger's suite runs; one that is not on this machine is skipped here, by name, and only here."""

from __future__ import annotations

import pytest

from services.buffer.connection import connect, verify
from slipstream.errors import ConfigError
from tests.contract.conftest import Started
from tests.redis_server import SERVERS

VERSIONS = {"valkey-9": "9.", "acl-restricted": "9.", "redis-7.0": "7.0.", "redis-8": "8."}


@pytest.mark.parametrize("name", SERVERS)
async def test_the_suite_runs_on(name: str, started: Started) -> None:
    """Valkey 9, the same with CONFIG and WAITAOF denied, Debian's Redis 7.0, Redis 8: each is accepted by the probe."""
    if SERVERS[name].binary is None:
        pytest.skip(f"{name} is not on this machine: make test-deps")
    client = connect(started(name).url)
    info = await client.info("server")
    assert str(info.get("valkey_version") or info["redis_version"]).startswith(VERSIONS[name])
    await verify(client, "memory")
    await client.aclose()


async def test_the_restricted_user_is_restricted(started: Started) -> None:
    """What managed services deny is denied in this suite, so that it shows that nothing needs it."""
    client = connect(started("acl-restricted").url)
    for command in (("CONFIG", "GET", "appendfsync"), ("WAITAOF", "0", "0", "0")):
        with pytest.raises(Exception, match="no permissions"):
            await client.execute_command(*command)
    with pytest.raises(ConfigError, match="cannot be verified"):
        await verify(client, "always", check="require")
    await client.aclose()
