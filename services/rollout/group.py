"""An engine over several nodes, the leader's side: orders to members, and their votes.

consumes      Follow and Report of a member on each other node    produces: orders; a version that all hold, or none loads
waits for     every member to follow; the report of each, within its order's time
unblocked by  their calls; a member's end, or its silence, which is the end of the group

Before anything is paused each node fetches and verifies the version, writes it as the leader did, and votes with the checksum
of its file. One vote that differs refuses the version on all nodes; the old one serves everywhere. The load itself reaches all
nodes at once, through vLLM. The unit of failure is the group: a member that is gone ends the leader's process, and the other
way round; whoever started them (a LeaderWorkerSet) starts all of them anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from slipstream.errors import Conflict, Fenced, InvalidInput, OutOfRange, Unavailable, from_status
from slipstream.lifecycle import Waits
from slipstream.protos.rollout.v1 import group_pb2 as pb
from slipstream.protos.rollout.v1 import group_pb2_grpc
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

PREPARE_S = 600.0  # a node that fetches a version for longer is lost
LAUNCH_S = 60.0


class Group(group_pb2_grpc.GroupServiceServicer):
    """slipstream.rollout.v1.GroupService, and what the leader asks of it. `nodes`: the leader's included, at least 2."""

    def __init__(self, nodes: int, waits: Waits) -> None:
        self._nodes, self._waits = nodes, waits
        self._orders: dict[int, asyncio.Queue[pb.FollowResponse]] = {}
        self._reports: dict[tuple[int, int], asyncio.Future[pb.ReportRequest]] = {}
        self._number = 0
        self._complete, self._over = asyncio.Event(), asyncio.Event()
        self._why = ""

    async def watch(self) -> None:
        """Returns never; raises Unavailable (GROUP) when the group is over."""
        await self._over.wait()
        raise self._end()

    async def prepare(self, version: PolicyVersion, folder: Path, name: str, crc32c: int) -> None:
        """Every member holds the version as the checkpoint `name` in `folder`, with the checksum of the leader's.

        Raises InvalidInput (VOTE) when one has other bytes or refuses them, Unavailable when one cannot get them now: no member
        keeps the file then. Unavailable (GROUP) when the group is over.
        """
        prepare = pb.Prepare(version=version, folder=str(folder), name=name)
        reports = await self._order(PREPARE_S, f"the other nodes to hold version {version.number}", prepare=prepare)
        try:
            for node, report in sorted(reports.items()):
                if (error := from_status(report.status)) is not None:
                    kind = InvalidInput if isinstance(error, InvalidInput) else Unavailable
                    raise kind(f"node {node} does not hold version {version.number}: {error.message}", "VOTE")
                if report.crc32c != crc32c:
                    raise InvalidInput(
                        f"node {node} holds version {version.number} as a file with checksum {report.crc32c:08x}, the leader "
                        f"with {crc32c:08x}: it is loaded nowhere", "VOTE", node=node)
        except (InvalidInput, Unavailable):
            self.forget(name)
            raise

    async def launch(self, address: str, port: int) -> None:
        """Start the members' parts of the engine, which look for the leader's at `address`. Raises Unavailable (GROUP)."""
        launch = pb.Launch(address=address, port=port)
        for node, report in sorted((await self._order(LAUNCH_S, "the other nodes to start", launch=launch)).items()):
            if (error := from_status(report.status)) is not None:
                self._break(f"node {node} did not start its part of the engine: {error.message}")
                raise self._end()

    def forget(self, name: str) -> None:
        """Nobody goes back to this checkpoint."""
        self._number += 1
        for queue in self._orders.values():
            queue.put_nowait(pb.FollowResponse(order=self._number, forget=pb.Forget(name=name)))

    async def Follow(self, request: pb.FollowRequest, context: Any) -> AsyncIterator[pb.FollowResponse]:
        node = request.node
        if not 0 < node < self._nodes:
            raise OutOfRange(
                f"node = {node}: the group has nodes 1 to {self._nodes - 1} beside the leader, by rollout.vllm.data_parallel "
                "and data_parallel_local", "NODE", node=node)
        if node in self._orders:
            raise Conflict(f"node {node} has a member already", "NODE", node=node)
        queue = self._orders[node] = asyncio.Queue()
        if len(self._orders) == self._nodes - 1:
            self._complete.set()
        try:
            while True:
                yield await queue.get()
        finally:
            self._break(f"node {node} ({request.instance}) is gone")

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:
        if request.node not in self._orders:
            raise Fenced(f"node {request.node} does not follow", "NODE", node=request.node)
        future = self._reports.get((request.node, request.order))
        if future is not None and not future.done():
            future.set_result(request)
        return pb.ReportResponse()

    async def _order(self, timeout_s: float, what: str, **kind: Any) -> dict[int, pb.ReportRequest]:
        """Give an order to all members: their reports by node. Raises Unavailable (GROUP)."""
        with self._waits.on(f"engine: {self._nodes - 1} other nodes to follow"):
            await self._or_over(self._complete.wait())
        self._number += 1
        number = self._number
        reports = {node: asyncio.get_running_loop().create_future() for node in self._orders}
        self._reports = {(node, number): future for node, future in reports.items()}
        for node in reports:
            self._orders[node].put_nowait(pb.FollowResponse(order=number, **kind))
        try:
            with self._waits.on(f"engine: {what}"):
                async with asyncio.timeout(timeout_s):
                    await self._or_over(asyncio.wait(list(reports.values())))
        except TimeoutError:
            silent = [node for node, future in reports.items() if not future.done()]
            self._break(f"nodes {silent} did not answer within {timeout_s:g} s")
            raise self._end() from None
        finally:
            self._reports = {}
        return {node: future.result() for node, future in reports.items()}

    async def _or_over(self, work: Any) -> None:
        """Until `work` is done. Raises Unavailable (GROUP) when the group is over first."""
        working, over = asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if self._over.is_set():
                raise self._end()
        finally:
            working.cancel()
            over.cancel()

    def _break(self, why: str) -> None:
        self._why = self._why or why
        self._over.set()

    def _end(self) -> Unavailable:
        return Unavailable(f"the engine of {self._nodes} nodes is over: {self._why}", "GROUP")
