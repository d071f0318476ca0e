"""A rollout worker with a node's folder and a weight server that is not there: it loads versions all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream import config
from slipstream.errors import ConfigError
from tests.scripted_buffer import ScriptedBuffer, published, service, slow_store, turns


async def test_a_worker_reads_versions_through_what_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both versions come from the store, once, and lie in the folder afterwards; the dead server was asked once and then left
    alone."""
    buffer = ScriptedBuffer()
    slow_store(monkeypatch, buffer)
    run = turns(tmp_path, objects={"near": {"cache": str(tmp_path / "cache"), "server": "127.0.0.1:1"}})
    await published(run, buffer, 1, 0)
    async with service(run, buffer) as context:
        await buffer.grant(0)
        await buffer.until(lambda: buffer.submitted)
        await published(run, buffer, 2, 1, seed=1)
        await buffer.until(lambda: 2 in buffer.holds)
        await buffer.grant(1, 2, 3, min_step=1)
        await buffer.until(lambda: len(buffer.submitted) == 4)
        assert context.policy_version is not None and context.policy_version.number == 2

        def reads(place: str, outcome: str) -> float:
            labels = {"place": place, "outcome": outcome}
            return context.registry.get_sample_value("slipstream_rollout_weight_reads_total", labels) or 0

        kept = [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".")]
        assert reads("store", "hit") == reads("node", "miss") == len(kept) >= 4
        assert 1 <= reads("server", "failed") < len(kept) and not reads("server", "hit")


def test_places_of_a_node_do_not_make_another_run_file() -> None:
    """Nodes differ in their disks: the buffer compares run files without them."""
    data = {"run": {"name": "a"}, "model": {"path": "/m"}, "environments": [{"name": "e", "entry": "m:C"}]}
    near = {"objects": {"near": {"cache": "/nvme/weights", "server": "weights:50051"}}}
    assert config.parse(data).hash == config.parse(data | near).hash
    with pytest.raises(ConfigError, match="cache_bytes"):
        config.parse(data | {"objects": {"near": {"cache_bytes": 0}}})
