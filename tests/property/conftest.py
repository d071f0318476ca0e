"""One Redis-protocol server for each file of property tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisProcess, redis_process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """A running server; whoever uses it empties it first."""
    with redis_process(Path(tmp_path_factory.mktemp("property"))) as process:
        yield process
