"""A rollout worker with a node's folder, and a weight server and peers that are not there: it loads versions all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout.peers import Peer
from slipstream import config
from slipstream.auth_credentials import Credentials
from slipstream.errors import ConfigError
from slipstream.lifecycle import SystemClock
from slipstream.manifest import manifest_of
from slipstream.ranges import Range, Span
from tests.ports import free_port
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


async def test_a_worker_offers_what_it_read(tmp_path: Path) -> None:
    """Its only peer is gone; it finds itself in the list, so it keeps what it owns, and serves it beside its own service: from
    memory, to workers of its run."""
    buffer = ScriptedBuffer()
    port = free_port()
    run = turns(tmp_path, objects={"near": {"peers": ["127.0.0.1:1", f"localhost:{port}"]}})
    version = await published(run, buffer, 1, 0)
    async with service(run, buffer, port) as context:
        await buffer.grant(0)
        await buffer.until(lambda: buffer.submitted)
        labels = {"place": "store", "outcome": "hit"}
        assert context.registry.get_sample_value("slipstream_rollout_weight_reads_total", labels)
        wanted = Range(version.manifest_key, 0, None, (Span(0, None, version.manifest_crc32c),))
        peer = Peer(context.address, Credentials("rollout"), SystemClock())
        data = await peer.read(wanted, run.run.name, held=True)
        assert data is not None and manifest_of(data, wanted.key).number == 1
        assert await peer.read(wanted, "another run", held=False) is None
        await peer.close()


def test_places_of_a_node_do_not_make_another_run_file() -> None:
    """Nodes differ in their disks: the buffer compares run files without them."""
    data = {"run": {"name": "a"}, "model": {"path": "/m"}, "environments": [{"name": "e", "entry": "m:C"}]}
    near = {"objects": {"near": {"cache": "/nvme/weights", "server": "weights:50051"}}}
    assert config.parse(data).hash == config.parse(data | near).hash
    with pytest.raises(ConfigError, match="workers' is not host:port"):
        config.parse(data | {"objects": {"near": {"peers": ["workers"]}}})
    with pytest.raises(ConfigError, match="cache_bytes"):
        config.parse(data | {"objects": {"near": {"cache_bytes": 0}}})
