"""An engine over three nodes: member processes that fetch, write and vote, and what becomes of the group when one fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.rollout import group as group_module
from services.rollout.group import Group
from slipstream import rpc
from slipstream.config import RunFile
from slipstream.errors import InvalidInput, SlipstreamError, Unavailable
from slipstream.lifecycle import SystemClock, Waits
from slipstream.manifest import RawTensor, write_version
from slipstream.objects import FileStore
from slipstream.protos.rollout.v1 import group_pb2 as pb
from slipstream.protos.rollout.v1 import group_pb2_grpc
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.ranges import checksum
from tests.rollout_runs import run_file

NODES = 3


class Leader:
    """The leader's side, with members as processes of their own."""

    def __init__(self, folder: Path, run: RunFile) -> None:
        self.folder, self.store = folder, FileStore(run.objects_url.removeprefix("file://"))
        self.group = Group(NODES, Waits(SystemClock()))
        self.server = rpc.Server(
            "127.0.0.1", 0, [(group_pb2_grpc.add_GroupServiceServicer_to_server, self.group)], grace_s=0)
        self.members: dict[int, asyncio.subprocess.Process] = {}
        (folder / "run.json").write_text(run.model_dump_json())

    async def start_member(self, node: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.unit.member_process", "--leader", self.server.address, "--node", str(node),
            "--run-file", str(self.folder / "run.json"), "--instance", f"member-{node}", "--buffer", "127.0.0.1:1",
            stderr=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.members[node] = process
        return process

    async def publish(self, number: int) -> tuple[PolicyVersion, int]:
        """(version, the checksum that the leader's own file would have)."""
        data = bytes([number]) * 4000
        version = await write_version(
            self.store, run="test", number=number, step=number, incarnation=1, files={"config.json": b"{}"},
            tensors=[RawTensor("w", "F32", (1000,), data)])
        return version, checksum(data)

    def files(self, node: int) -> list[str]:
        return sorted(p.name for p in (self.folder / f"member-{node}").glob("*.safetensors"))


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    run = run_file(tmp_path, rollout={"engine": "vllm", "vllm": {"data_parallel": 6, "data_parallel_local": 2}}, service={
        "metrics": False})
    leader = Leader(tmp_path, run)
    await leader.server.start()
    for node in (1, 2):
        await leader.start_member(node)
    yield leader
    for member in leader.members.values():
        if member.returncode is None:
            member.kill()
        _, said = await member.communicate()
        print(said.decode(errors="replace"))  # shown when the test fails
    await leader.server.stop()


@pytest.mark.slow
@pytest.mark.nightly
async def test_a_version_is_on_every_node_or_on_none(leader: Leader) -> None:
    """Three versions: held by all; written wrongly by one, refused by name and forgotten by both, while the first stays; and
    held again. The engine starts on every node, and the end of its part on one node is the end of that member, of the group,
    and of the other member."""
    first, crc32c = await leader.publish(1)
    async with asyncio.timeout(200):
        await leader.group.prepare(first, leader.folder, "0.safetensors", crc32c)
        await leader.group.launch("10.0.0.1", 29550)
        engines = [json.loads((leader.folder / f"member-{n}" / "engine.json").read_text()) for n in (1, 2)]
        assert [(e["node"], e["at"]) for e in engines] == [(1, "10.0.0.1:29550"), (2, "10.0.0.1:29550")]
        second, crc32c = await leader.publish(2)
        (leader.folder / "member-2" / "spoil").touch()
        with pytest.raises(InvalidInput, match="node 2 holds version 2 as a file with checksum"):
            await leader.group.prepare(second, leader.folder, "1.safetensors", crc32c)
        await leader.group.prepare(second, leader.folder, "2.safetensors", crc32c)
        assert [leader.files(n) for n in (1, 2)] == [["0.safetensors", "2.safetensors"]] * 2
        given = [json.loads((leader.folder / f"member-{n}" / "files.json").read_text()) for n in (1, 2)]
        assert given == [[str(leader.folder), "config.json"]] * 2
        elsewhere = leader.folder / "another-engine"  # the leader's engine was built anew: it asks for everything again
        await leader.group.prepare(second, elsewhere, "2.safetensors", crc32c)
        assert json.loads((leader.folder / "member-1" / "files.json").read_text()) == [str(elsewhere), "config.json"]
        lost = PolicyVersion(number=9, manifest_key="versions/00000009-1/manifest.json")
        with pytest.raises(InvalidInput, match="node 1 does not hold version 9"):
            await leader.group.prepare(lost, leader.folder, "3.safetensors", 0)
        watching = asyncio.ensure_future(leader.group.watch())
        os.kill(engines[1]["pid"], signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"3 nodes is over: node 2 \(member-2\) is gone"):
            await watching
        assert await leader.members[2].wait() == 1
        with pytest.raises(Unavailable, match="is over"):
            await leader.group.prepare(second, leader.folder, "4.safetensors", crc32c)
        await leader.server.stop()
        assert await leader.members[1].wait() == 1


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.nightly
async def test_a_member_that_stands_still_is_lost(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not vote in time: the order fails, naming the node, and with it the group. A node that does not exist, and one
    that has a member, are refused."""
    first, crc32c = await leader.publish(1)
    async with asyncio.timeout(200):
        await leader.group.prepare(first, leader.folder, "0.safetensors", crc32c)
        async with rpc.channel(leader.server.address) as channel:
            stub = group_pb2_grpc.GroupServiceStub(channel)
            for node, words in ((NODES, "nodes 1 to 2"), (0, "nodes 1 to 2"), (1, "has a member already")):
                with pytest.raises(SlipstreamError, match=words):
                    async for _ in rpc.stream(stub.Follow, pb.FollowRequest(node=node), 5):
                        raise AssertionError("it got an order")
        monkeypatch.setattr(group_module, "PREPARE_S", 0.5)
        leader.members[1].send_signal(signal.SIGSTOP)
        second, crc32c = await leader.publish(2)
        with pytest.raises(Unavailable, match=r"nodes \[1\] did not answer within 0.5 s"):
            await leader.group.prepare(second, leader.folder, "1.safetensors", crc32c)
        leader.members[1].send_signal(signal.SIGCONT)
        with pytest.raises(Unavailable, match="is over"):
            await leader.group.watch()


async def test_nobody_waits_for_members_that_never_come(tmp_path: Path) -> None:
    """What the leader waits for is said, and the end of the group ends the wait."""
    waits = Waits(SystemClock())
    group = Group(NODES, waits)
    preparing = asyncio.ensure_future(group.prepare(PolicyVersion(number=1), tmp_path, "0", 0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waits.current is not None and waits.current[0] == "engine: 2 other nodes to follow"
    group._break("the test ends it")
    with pytest.raises(Unavailable, match="the test ends it"):
        await preparing
