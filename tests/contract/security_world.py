"""A server of every RPC of the contract, and callers of every role: what the security tests share."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.rpc import code_pb2

import slipstream.protos
from slipstream import auth, rpc, tls_authority
from slipstream.auth_credentials import Credentials
from slipstream.auth_tokens import Keys
from slipstream.errors import SlipstreamError, from_rpc_error
from slipstream.tls import Certificates

SECRET = b"0123456789abcdef0123456789abcdef"
RUN = "demo"
DAY = datetime.timedelta(days=1)


def methods() -> Iterator[Any]:
    """The descriptor of every method of every service in slipstream/protos."""
    for found in pkgutil.walk_packages(slipstream.protos.__path__, "slipstream.protos."):
        if found.name.endswith("_pb2"):
            for service in importlib.import_module(found.name).DESCRIPTOR.services_by_name.values():
                yield from service.methods


def path_of(method: Any) -> str:
    """slipstream.buffer.v1.BatchService/LeaseBatch"""
    return f"{method.containing_service.full_name}/{method.name}"


class Everything:
    """Answers each method with an empty message, and remembers who got through. A registration for rpc.Server."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.shown = b""  # the certificate of the last caller, PEM

    def add(self, servicer: object, server: Any) -> None:
        services: dict[str, dict[str, Any]] = {}
        for method in methods():
            services.setdefault(method.containing_service.full_name, {})[method.name] = self._handler(method)
        server.add_generic_rpc_handlers(tuple(
            grpc.method_handlers_generic_handler(name, handlers) for name, handlers in services.items()))

    def _handler(self, method: Any) -> Any:
        request, response = (message_factory.GetMessageClass(m) for m in (method.input_type, method.output_type))

        async def one(request: Any, context: Any) -> Any:
            self.calls.append(path_of(method))
            self.shown = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
            return response()

        async def many(request: Any, context: Any) -> Any:
            self.calls.append(path_of(method))
            yield response()

        async def each(requests: Any, context: Any) -> Any:
            async for _ in requests:
                self.calls.append(path_of(method))
                yield response()

        make = getattr(grpc, f"{_kind(method)}_rpc_method_handler")
        handle = each if method.client_streaming else many if method.server_streaming else one
        return make(handle, request.FromString, response.SerializeToString)


def _kind(method: Any) -> str:
    """unary_unary, unary_stream or stream_stream."""
    return f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


async def attempt(channel: grpc.aio.Channel, method: Any, request: Any = None) -> tuple[int, str]:
    """Call one method; the google.rpc code of the outcome and its reason.

    Of a call that is refused while something is still written into it, grpc.aio may say INTERNAL, if its write fails before the
    refusal is read. Whoever streams calls again (slipstream.sample_stream), so this does, too.
    """
    for _ in range(5 if method.client_streaming else 1):
        code, reason = await _attempt(channel, method, request)
        if code != code_pb2.INTERNAL:
            break
    return code, reason


async def _attempt(channel: grpc.aio.Channel, method: Any, request: Any) -> tuple[int, str]:
    request_class, response_class = (message_factory.GetMessageClass(m) for m in (method.input_type, method.output_type))
    call = getattr(channel, _kind(method))(
        f"/{path_of(method)}", request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString)
    given = request or request_class()
    given = _only(given) if method.client_streaming else given
    try:
        if method.server_streaming:
            assert [m async for m in call(given, timeout=10)] == [response_class()]
        else:
            await call(given, timeout=10)
    except grpc.aio.AioRpcError as error:
        got: SlipstreamError = from_rpc_error(error)
        return got.code, got.reason
    return code_pb2.OK, ""


class World:
    """Certificates of every role, a server with all RPCs that wants them, and channels to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.everything = folder, Everything()
        self.authority = tls_authority.create_authority()
        for role in auth.ROLES:
            tls_authority.issue(self.authority, folder / role, role)
        self.address = ""

    def credentials(self, role: str, folder: Path | None = None, **more: Any) -> Credentials:
        return Credentials(role, RUN, more.pop("keys", Keys()), Certificates(folder or self.folder, role), **more)

    def odd(self, name: str, authority: tls_authority.Authority | None = None, **how: Any) -> Credentials:
        """A trainer's credentials with a certificate that differs from what it should be by `how`; see tls_authority.issue."""
        role = "trainer"
        tls_authority.issue(authority or self.authority, self.folder / name / role, role, **how)
        if authority is not None:  # the caller trusts the server, but not the other way round
            (self.folder / name / role / "ca.crt").write_bytes(self.authority.pem)
        return self.credentials(role, self.folder / name)

    @contextlib.asynccontextmanager
    async def server(self, **options: Any) -> AsyncIterator[rpc.Server]:
        options.setdefault("credentials", self.credentials("buffer"))
        async with rpc.Server("127.0.0.1", 0, [(self.everything.add, None)], grace_s=0.1, **options) as server:
            self.address = server.address
            yield server

    def channel(self, credentials: Credentials, peer: str = "buffer") -> grpc.aio.Channel:
        return rpc.channel(self.address, credentials=credentials, peer=peer)
