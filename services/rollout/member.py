"""A node of an engine over several nodes that does not serve: it follows the leader's orders.

    python -m services.rollout.member --leader HOST:PORT --node N, and the options of services.rollout

consumes      orders of GroupService; versions, as a rollout worker    produces: checkpoint files; votes; a part of the engine
waits for     the leader; its orders; the object store
unblocked by  their answers; the leader's end, which is this process's end, too
on failure    exit 1: the group starts anew as one
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from services.rollout.near import Near, nearest
from slipstream import logs, rpc
from slipstream.errors import ConfigError, SlipstreamError, Unavailable, from_rpc_error, to_status
from slipstream.lifecycle import CLOSE
from slipstream.manifest import Held, read_complete, read_files, read_manifest, read_tensors
from slipstream.protos.rollout.v1 import group_pb2 as pb
from slipstream.protos.rollout.v1.group_pb2_grpc import GroupServiceStub
from slipstream.service import ServiceContext, main
from slipstream.telemetry import RolloutMetrics

CALL_S = 10.0

log = logs.get("rollout")


class Part(Protocol):
    """This node's part of the engine."""

    def write(self, files: Any, tensors: Any, folder: Path, name: str) -> int:
        """Write a version as a checkpoint; the CRC-32C of its file. The first call for a folder gets all tensors and files.

        Raises InvalidInput.
        """
        ...

    async def launch(self, node: int, address: str, port: int) -> None:
        """Start from the version that was written first; raises Unavailable."""
        ...

    async def ended(self) -> None:
        """Until what was launched has ended by itself. Never before a launch."""
        ...

    def forget(self, name: str) -> None: ...

    async def stop(self) -> None: ...


class Member:
    """Follows orders until the leader is gone."""

    def __init__(self, context: ServiceContext, leader: str, node: int, part: Part) -> None:
        self._context, self._node, self._part = context, node, part
        self._source = nearest(context, RolloutMetrics(context.registry))
        self.serving: list[rpc.Registration] = []  # what other workers ask of this one
        if isinstance(self._source, Near):
            context.lifecycle.on_stop(CLOSE, self._source.close, "places of versions")
            self.serving = self._source.serving
        self._channel = rpc.channel(leader, credentials=context.credentials, peer="rollout")
        context.lifecycle.on_stop(CLOSE, self._channel.close, "leader")
        self._stub = GroupServiceStub(self._channel)
        self._held: Held | None = None
        self._folder = ""  # of the leader's engine: another one is another engine, which is given everything again

    async def follow(self) -> None:
        """Orders, one after the other. Raises Unavailable when the leader is gone, whatever the leader refuses."""
        with self._context.waits.on("the leader of the engine"):
            await self._channel.channel_ready()
        request = pb.FollowRequest(node=self._node, instance=self._context.arguments.instance)
        try:
            async for order in self._stub.Follow(request):
                report = await self._done(order)
                await rpc.call(self._stub.Report, report, CALL_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        raise Unavailable("the leader has ended the group", "GROUP")

    async def watch(self) -> None:
        """Raises Unavailable when this node's part of the engine has ended."""
        await self._part.ended()
        raise Unavailable("this node's part of the engine has ended", "GROUP")

    async def _done(self, order: pb.FollowResponse) -> pb.ReportRequest:
        """Carry an order out; what became of it. A version that cannot be had is a vote, not an error."""
        report = pb.ReportRequest(node=self._node, order=order.order)
        try:
            kind = order.WhichOneof("kind")
            if kind == "prepare":
                with self._context.waits.on(f"version {order.prepare.version.number} for the leader"):
                    report.crc32c = await self._prepare(order.prepare)
            elif kind == "launch":
                await self._part.launch(self._node, order.launch.address, order.launch.port)
            elif kind == "forget":
                self._part.forget(order.forget.name)
        except SlipstreamError as error:
            log.warning(f"order {order.order} of the leader failed: {error.message}", reason=error.reason)
            report.status.CopyFrom(to_status(error))
        return report

    async def _prepare(self, order: pb.Prepare) -> int:
        context, version = self._context, order.version
        manifest = await read_manifest(self._source, version, context.run.run.name)
        first = self._held is None or self._folder != order.folder
        tensors = await (read_complete(self._source, manifest) if first else read_tensors(
            self._source, manifest, self._held))
        files = await read_files(self._source, manifest) if first else {}
        crc32c = await asyncio.to_thread(self._part.write, files, tensors, Path(order.folder), order.name)
        own = tensors if manifest.base is None else [t for t in tensors if t.name in {e.name for e in manifest.tensors}]
        self._held, self._folder = Held(version, own, manifest.full), order.folder
        context.policy_version = version
        return crc32c


async def start(context: ServiceContext, leader: str, node: int, part: Part) -> None:
    """Serve health and status, follow the leader."""
    member = Member(context, leader, node, part)
    await context.serve(member.serving)
    context.lifecycle.on_stop(CLOSE, part.stop, "engine")
    context.lifecycle.spawn("orders", member.follow())
    context.lifecycle.spawn("engine", member.watch())


def run(make: Callable[[ServiceContext], Part], argv: Sequence[str]) -> None:
    """The process of a member; never returns. Exits with 2 for a command line that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout.member", description="A node behind an engine's leader.")
    parser.add_argument("--leader", required=True, help="host:port of the leader's gRPC server")
    parser.add_argument("--node", type=int, required=True, help="1 to the number of nodes - 1")
    own, rest = parser.parse_known_args(argv)

    def begin(context: ServiceContext) -> Awaitable[None]:
        if context.run.rollout.vllm.nodes < 2:
            raise ConfigError(
                "rollout.vllm.data_parallel_local covers data_parallel: the engine has one node, and no member is needed")
        return start(context, own.leader, own.node, make(context))

    main("rollout", begin, rest)


if __name__ == "__main__":
    from services.rollout.vllm_part import VllmPart

    run(lambda context: VllmPart(context.run), sys.argv[1:])
