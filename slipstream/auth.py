"""Who may call what: a role token in the metadata of each call, checked before the method runs.

The token is HMAC-SHA256(secret, role) in hex, sent as `authorization: Slipstream <role>:<token>`. The secret is the file
`secret` in the run folder, readable by its owner only. Without that file nobody is checked, and servers listen on loopback
only.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Any

import grpc
from google.rpc import code_pb2

from slipstream.errors import ConfigError, SlipstreamError

ROLES = ("rollout", "reward", "trainer", "buffer", "client", "cli")
HEADER = "authorization"
_SCHEME = "Slipstream "

_ANY = frozenset(ROLES)
_BUFFER = "slipstream.buffer.v1."
# Roles by service, and by method where it differs. What is not named is open to every role.
ALLOWED: dict[str, frozenset[str]] = {
    f"{_BUFFER}SampleService": frozenset({"rollout"}),
    f"{_BUFFER}ScoreService": frozenset({"reward"}),
    f"{_BUFFER}BatchService": frozenset({"trainer"}),
    f"{_BUFFER}PolicyService/ReserveVersion": frozenset({"trainer"}),
    f"{_BUFFER}PolicyService/PublishVersion": frozenset({"trainer"}),
}
# Services that anybody may ask: probes and tools have no token.
OPEN = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})


class Unauthenticated(SlipstreamError):
    """The call carries no valid role token."""

    code = code_pb2.UNAUTHENTICATED


class PermissionDenied(SlipstreamError):
    """The caller's role may not call this method."""

    code = code_pb2.PERMISSION_DENIED


def token(secret: bytes, role: str) -> str:
    """The token of a role."""
    return hmac.new(secret, role.encode(), hashlib.sha256).hexdigest()


def metadata(role: str, secret: bytes) -> tuple[tuple[str, str], ...]:
    """What a client sends with each call; nothing without a secret."""
    return ((HEADER, f"{_SCHEME}{role}:{token(secret, role)}"),) if secret else ()


def read_secret(folder: Path) -> bytes:
    """The secret of a run, b"" when it has none. Raises ConfigError when others may read the file."""
    path = folder / "secret"
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others: chmod 600 {path}")
        secret = path.read_bytes().strip()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(secret) < 16:
        raise ConfigError(f"{path} holds {len(secret)} bytes, at least 16 are needed: delete it and start again")
    return secret


def create_secret(folder: Path) -> bytes:
    """The secret of a run, made when there is none."""
    path = folder / "secret"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_secret(folder)
    with os.fdopen(handle, "wb") as file:
        file.write(os.urandom(32).hex().encode())
    return read_secret(folder)


def check(method: str, header: str | None, secret: bytes) -> str:
    """The caller's role. `method` is "/package.Service/Method". Raises Unauthenticated or PermissionDenied."""
    role, _, given = (header or "").removeprefix(_SCHEME).partition(":")
    if not header:
        raise Unauthenticated(f"{method} needs a role token in the {HEADER} metadata", "TOKEN_MISSING", method=method)
    if role not in _ANY or not hmac.compare_digest(given.encode(), token(secret, role).encode()):
        raise Unauthenticated(
            f"{method}: the token of role {role[:20]!r} is not valid for this run", "TOKEN_INVALID",
            method=method, role=role[:20])
    service = method.strip("/").partition("/")[0]
    allowed = ALLOWED.get(method.strip("/")) or ALLOWED.get(service)
    if allowed is not None and role not in allowed:
        raise PermissionDenied(
            f"{method} is for {', '.join(sorted(allowed))}, not for role {role}", "ROLE", method=method, role=role)
    return role


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuse calls without a valid token of an allowed role. Sits inside the interceptor that turns errors into statuses."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        details = handler_call_details
        if details.method.strip("/").partition("/")[0] not in OPEN:
            header = next((value for key, value in details.invocation_metadata if key == HEADER), None)
            try:
                check(details.method, header if isinstance(header, str) else None, self._secret)
            except SlipstreamError as error:
                return _refuse(await continuation(details), error)
        return await continuation(details)


def _refuse(handler: Any, error: SlipstreamError) -> Any:
    """A handler of the same kind that raises; None for an unknown method."""

    async def one(request: object, context: object) -> None:
        raise error

    async def many(request: object, context: object):
        raise error
        yield

    if handler is None:
        return handler
    make = {
        (False, False): (grpc.unary_unary_rpc_method_handler, one), (False, True): (grpc.unary_stream_rpc_method_handler, many),
        (True, False): (grpc.stream_unary_rpc_method_handler, one), (True, True): (grpc.stream_stream_rpc_method_handler, many),
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make[0](make[1], handler.request_deserializer, handler.response_serializer)
