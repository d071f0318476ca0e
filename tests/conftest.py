"""Fixtures of several folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisProcess, redis_process


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A real Redis-protocol server of this test's own."""
    with redis_process(tmp_path / "redis") as process:
        yield process
