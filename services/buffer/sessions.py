"""SessionService: client programs that drive an episode themselves. Not offered by this buffer yet: every call says so."""

from __future__ import annotations

from typing import Any

from google.rpc import code_pb2

from slipstream.errors import SlipstreamError
from slipstream.protos.buffer.v1 import sessions_pb2_grpc


class NotOffered(SlipstreamError):
    """The method exists in the contract, but this server does not implement it."""

    code = code_pb2.UNIMPLEMENTED


class SessionServicer(sessions_pb2_grpc.SessionServiceServicer):
    async def OpenSession(self, request: Any, context: Any) -> Any:
        raise _not_offered()

    async def HeartbeatSession(self, request: Any, context: Any) -> Any:
        raise _not_offered()

    async def CloseSession(self, request: Any, context: Any) -> Any:
        raise _not_offered()


def _not_offered() -> NotOffered:
    return NotOffered(
        "client sessions are not served by this buffer; serve the environment over gRPC (slipstream env serve) instead",
        "SESSIONS_NOT_OFFERED")
