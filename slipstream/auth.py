"""Who may call what. Each call proves a role before its method runs, and the table says which methods that role may call.

A role is proved by the caller's certificate (slipstream.tls), by a role token on loopback, or by a signed token
(slipstream.auth_tokens). The role `client`, programs outside, always needs a signed token: it tells who, until when, how much.
Without certificates and without the file `secret` in the run folder nobody is checked, and servers listen on loopback only.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from slipstream import tls
from slipstream.auth_credentials import HEADER, Credentials
from slipstream.auth_quotas import Quotas
from slipstream.auth_tokens import SIGNED_TOKEN, Unauthenticated, read_secrets, role_by_token, verify
from slipstream.errors import InvalidInput, SlipstreamError

ROLES = ("rollout", "reward", "trainer", "buffer", "environment", "client", "cli")
_OWN = "rollout reward trainer buffer cli"  # the run's services, and the person who runs it

# Service, methods, roles. Closed: a method that is not here is nobody's. tests/contract/test_security.py tries every pair.
_TABLE = (
    ("buffer.v1.SampleService", "LeaseSamples HeartbeatSamples SubmitSamples StreamSamples SubmitPartials ReleaseSamples",
     "rollout"),
    ("buffer.v1.ScoreService", "LeaseUnscored HeartbeatScoring SubmitScores", "reward"),
    ("buffer.v1.BatchService", "TakeIncarnation LeaseBatch ReadBatch CommitBatches", "trainer"),
    ("buffer.v1.PolicyService", "ReserveVersion PublishVersion", "trainer"),
    ("buffer.v1.PolicyService", "WatchVersions ListVersions HoldVersion", _OWN),
    ("buffer.v1.LedgerService", "GetBalance ListDeadLetters", _OWN),
    ("buffer.v1.SessionService", "OpenSession HeartbeatSession CloseSession", "client"),
    ("rollout.v1.RolloutService", "Generate", "client cli"),
    ("rollout.v1.RolloutService", "Drain", "cli"),
    ("rollout.v1.GroupService", "Follow Report", "rollout"),  # nodes of one engine
    ("reward.v1.RewardService", "ScoreTranscripts", "rollout reward client cli"),
    ("trainer.v1.TrainerService", "GetProgress", _OWN),
    ("trainer.v1.TrainerService", "RequestCheckpoint", "cli"),
    ("environment.v1.EnvironmentService", "Describe", "rollout trainer buffer cli"),
    ("environment.v1.EnvironmentService", "Reset Close", "rollout trainer cli"),  # the trainer's warm-up asks for answers
    ("environment.v1.EnvironmentService", "Step", "rollout cli"),
    ("weights.v1.WeightService", "ReadRange", "rollout"),
    ("types.v1.StatusService", "GetStatus", _OWN),
)
ALLOWED: dict[str, frozenset[str]] = {
    f"slipstream.{service}/{method}": frozenset(roles.split())
    for service, methods, roles in _TABLE for method in methods.split()}
_ARITY = {False: "unary", True: "stream"}
# Services that anybody who reaches the port may ask: probes and tools. They tell health and the public contract.
OPEN = frozenset({"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"})


class PermissionDenied(SlipstreamError):
    """The caller's role may not call this method."""

    code = code_pb2.PERMISSION_DENIED


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, how that was proved, and how much is allowed a minute (0 = any)."""

    role: str
    proof: str
    name: str = ""
    calls_per_minute: int = 0
    bytes_per_minute: int = 0


def read_secret(folder: Path) -> bytes:
    """The signing secret of a run, b"" when it has none. Raises ConfigError when others may read the file."""
    return next(iter(read_secrets(folder / "secret")), b"")


def create_secret(folder: Path) -> bytes:
    """The secret of a run, made when there is none."""
    try:
        handle = os.open(folder / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_secret(folder)
    with os.fdopen(handle, "wb") as file:
        file.write(os.urandom(32).hex().encode())
    return read_secret(folder)


def authorise(method: str, caller: Caller) -> None:
    """Raises PermissionDenied unless the table lets this role call "/package.Service/Method"."""
    allowed = ALLOWED.get(method.strip("/"), frozenset())
    if caller.role not in allowed:
        whose = f"for {', '.join(sorted(allowed))}" if allowed else "in no role's table (slipstream/auth.py)"
        raise PermissionDenied(
            f"{method} is {whose}, not for role {caller.role} (by {caller.proof}): call it with the certificate or token of a "
            "role that may", "ROLE", method=method, role=caller.role)


def identify(
    method: str, header: str, properties: Mapping[str, Iterable[bytes]], credentials: Credentials, now_unix: float,
) -> Caller:
    """Who calls, by the authorization metadata and the transport's auth_context(). Raises Unauthenticated."""
    secure = b"ssl" in properties.get("transport_security_type", ())
    by_certificate = ""
    if "x509_pem_cert" in properties:
        by_certificate = tls.role_of(properties, credentials.run)
        if by_certificate not in ROLES:
            raise Unauthenticated(
                f"{method}: the caller's certificate names no role of run {credentials.run}: it needs one URI "
                f"{tls.identity('<role>', credentials.run)}, with one of {', '.join(ROLES)}", "CERTIFICATE_ROLE", method=method)
        if by_certificate != "client":
            return Caller(by_certificate, "certificate")
    if header.startswith(SIGNED_TOKEN):
        claims = verify(header.removeprefix(SIGNED_TOKEN), credentials.keys.secrets, now_unix)
        if by_certificate in ("", claims.role):
            return Caller(
                claims.role, "signed token", claims.name, claims.calls_per_minute or credentials.calls_per_minute,
                claims.bytes_per_minute or credentials.bytes_per_minute)
        raise Unauthenticated(
            f"{method}: the token of {claims.name} is for role {claims.role}, the certificate for {by_certificate}: use one "
            "role", "TOKEN_ROLE", method=method)
    if not header or secure:
        kind = "signed" if secure else "role"
        raise Unauthenticated(
            f"{method} needs a {kind} token in the {HEADER} metadata" + (": slipstream token makes one" if secure else ""),
            "TOKEN_MISSING", method=method)
    role, given = role_by_token(header, credentials.keys.secrets), header.partition(" ")[2].partition(":")[0][:20]
    if role not in ROLES or role == "client":
        needs = ": role client needs a signed one (slipstream token)" if role else ": is it of another run?"
        raise Unauthenticated(
            f"{method}: the token of role {given!r} is not valid for this run{needs}", "TOKEN_INVALID", method=method,
            role=given)
    return Caller(role, "role token")


class RoleGuard:
    """Refuse calls without a proved and allowed role, or over their quota. Sits inside the one that turns errors into
    statuses, around the method: only there does gRPC tell whose certificate it was."""

    def __init__(
        self, credentials: Credentials, unix: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._credentials, self._unix, self._quotas = credentials, unix, Quotas(clock)

    def around(self, method: str, handler: Any) -> Any:
        """The handler of "/package.Service/Method" behind the checks; that of an open service as it is."""
        return handler if method.strip("/").partition("/")[0] in OPEN else self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        """A request stays bytes until its caller is known: nobody else's is parsed."""
        read: Callable[[Any], Any] = handler.request_deserializer or bytes

        def known(context: grpc.aio.ServicerContext) -> Caller:
            told = context.invocation_metadata() or ()
            header = next((value for key, value in told if key == HEADER and isinstance(value, str)), "")
            caller = identify(method, header, context.auth_context(), self._credentials, self._unix())
            authorise(method, caller)
            return caller if caller.name else self._own(caller, context.peer())

        def admit(request: bytes, caller: Caller) -> Any:
            if caller.calls_per_minute or caller.bytes_per_minute:
                self._quotas.take(caller.name, caller.calls_per_minute, caller.bytes_per_minute, len(request))
            try:
                return read(request)
            except DecodeError as error:
                raise InvalidInput(f"{method}: the request is not of its type: {error}", "MESSAGE", method=method) from None

        async def one(request: Any, context: grpc.aio.ServicerContext) -> Any:
            caller = known(context)
            response = await inner(admit(request, caller), context)
            self._charge(caller, response)
            return response

        async def many(request: Any, context: grpc.aio.ServicerContext) -> Any:
            caller = known(context)
            async for response in inner(admit(request, caller), context):
                self._charge(caller, response)
                yield response

        async def streams(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> Any:
            """The caller is known before the first request is read; a quota counts each of them as a call."""
            caller = known(context)

            async def admitted() -> AsyncIterator[Any]:
                async for request in requests:
                    yield admit(request, caller)

            async for response in inner(admitted(), context):
                self._charge(caller, response)
                yield response

        kind = f"{_ARITY[handler.request_streaming]}_{_ARITY[handler.response_streaming]}"
        inner = getattr(handler, kind)
        if handler.request_streaming and not handler.response_streaming:
            raise NotImplementedError(f"{method} streams requests for one answer, which nothing checks yet")
        guard = streams if handler.request_streaming else many if inspect.isasyncgenfunction(inner) else one
        return getattr(grpc, f"{kind}_rpc_method_handler")(guard, None, handler.response_serializer)

    def _own(self, caller: Caller, peer: str) -> Caller:
        """One of the run's own processes: its limits go by role and address, "ipv4:10.0.0.7:54321" without the port."""
        calls, size = self._credentials.own_calls_per_minute, self._credentials.own_bytes_per_minute
        if not calls and not size:
            return caller
        return dataclasses.replace(
            caller, name=f"{caller.role} at {peer.rpartition(':')[0]}", calls_per_minute=calls, bytes_per_minute=size)

    def _charge(self, caller: Caller, response: Any) -> None:
        if caller.name:
            self._quotas.charge(caller.name, len(response) if isinstance(response, bytes) else response.ByteSize())
