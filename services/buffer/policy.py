"""PolicyService: hops 5 and 7. Events are hints: a watch gives the newest version, gaps are normal.

Waits for: a version newer than the watcher's. Unblocked by: a publication here (at once) or at another front (slow poll), or
the watcher going away.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from services.buffer.changes import SLOW_POLL_S
from services.buffer.front import Front, require, shielded, to_version
from services.buffer.ledger import Published, Version
from slipstream import logs, rpc
from slipstream.errors import Unavailable
from slipstream.protos.buffer.v1 import policy_pb2, policy_pb2_grpc

log = logs.get("buffer")


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    async def ReserveVersion(
            self, request: policy_pb2.ReserveVersionRequest, context: Any) -> policy_pb2.ReserveVersionResponse:
        number = await shielded(self._front.ledger.reserve_version(request.incarnation, request.step))
        return policy_pb2.ReserveVersionResponse(number=number)

    async def PublishVersion(
            self, request: policy_pb2.PublishVersionRequest, context: Any) -> policy_pb2.PublishVersionResponse:
        v = request.version
        require(bool(v.manifest_key), "version.manifest_key", v.manifest_key, "write the manifest first")
        version = Version(v.number, v.step, v.incarnation, v.manifest_key, v.manifest_crc32c)
        published = await shielded(self._publish(version, request.next_step))
        return policy_pb2.PublishVersionResponse(
            deletable=[to_version(d) for d in published.deletable], next_number=published.next_number)

    async def _publish(self, version: Version, next_step: int) -> Published:
        """Watchers are told before anything else: what workers do first is to load it."""
        published = await self._front.ledger.publish_version(version, next_step)
        self._front.published(published.versions)
        log.info("published", version=version.number, step=version.step)
        return published

    async def WatchVersions(
            self, request: policy_pb2.WatchVersionsRequest, context: Any) -> AsyncIterator[policy_pb2.WatchVersionsResponse]:
        front, after = self._front, request.after
        while not front.changes.closed:
            ticket = front.changes.ticket("versions")
            try:
                await front.refresh_versions()
            except Unavailable:  # Redis is away: go on with what is known, look again later
                ticket = -1
            if front.newest and front.newest.number > after:
                after = front.newest.number
                yield policy_pb2.WatchVersionsResponse(version=front.newest)
                continue
            await front.changes.changed("versions", ticket if ticket >= 0 else front.changes.ticket("versions"), SLOW_POLL_S)

    async def ListVersions(self, request: policy_pb2.ListVersionsRequest, context: Any) -> policy_pb2.ListVersionsResponse:
        await self._front.refresh_versions(force=True)
        versions = self._front.versions
        return policy_pb2.ListVersionsResponse(versions=versions[:request.limit or len(versions)])

    async def HoldVersion(self, request: policy_pb2.HoldVersionRequest, context: Any) -> policy_pb2.HoldVersionResponse:
        require(bool(request.reader), "reader", request.reader, "name the reader")
        await self._front.ledger.hold_version(request.version, request.reader, int(rpc.seconds(request.ttl) * 1000))
        return policy_pb2.HoldVersionResponse()
