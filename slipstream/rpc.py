"""gRPC as every service uses it: channels, servers, deadlines, errors, retries.

Errors cross the wire as google.rpc.Status with ErrorInfo and RetryInfo (slipstream.errors): a SlipstreamError raised in a
handler is the same SlipstreamError at the caller; anything else is INTERNAL and logged with its traceback.

Every call has a deadline. Idempotent calls go through `call_until`, which rides out restarts of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
import uvloop
from google.protobuf import duration_pb2
from grpc_health.v1 import health as health_names
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from slipstream import auth, errors, logs, tls
from slipstream.auth_credentials import Credentials, fixed
from slipstream.errors import ConfigError, Unavailable
from slipstream.lifecycle import Clock, Waits
from slipstream.rpc_channel import RenewingChannel, TokenChannel
from slipstream.rpc_methods import Boundary, Observe, Registrar

T = TypeVar("T")
Registration = tuple[Callable[[Any, Any], None], Any]

MESSAGE_BYTES = 64 << 20
_REACHED_S = 2.0
_BACKOFF_S, _BACKOFF_MOST_S = 0.05, 2.0
_LIMITS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
]
CLIENT_OPTIONS = [
    *_LIMITS,
    # A dead peer is noticed within 30 s, also in the middle of a long poll. The server permits these pings, see below.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted server is found again within 2 s, not within gRPC's default of up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Half of the clients' interval: without this the server answers their pings with GOAWAY (too_many_pings).
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port must be an error, not a lottery.
    ("grpc.so_reuseport", 0),
]
# Calls in flight end first: the age has no grace by default. Whoever connects and says nothing is dropped, not after 120 s.
_SECURE_OPTIONS = [("grpc.max_connection_age_ms", int(tls.CONNECTION_S * 1000)), ("grpc.server_handshake_timeout_ms", 10_000)]

log = logs.get("rpc")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine on uvloop."""
    return uvloop.run(main)


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a protobuf Duration, to the nanosecond."""
    value = duration_pb2.Duration()
    value.FromNanoseconds(round(seconds * 1e9))
    return value


def seconds(value: duration_pb2.Duration) -> float:
    """A protobuf Duration as seconds."""
    return value.seconds + value.nanos / 1e9


def channel(
    address: str, role: str = "", secret: bytes = b"", credentials: Credentials | None = None, peer: str = "buffer",
    insecure: bool = False, connect_s: float = 0.1,
) -> grpc.aio.Channel:
    """A channel to host:port or unix:path that proves who calls by `credentials` (or by a role and a fixed secret).

    With certificates the server has to be of role `peer`, wherever it is, and renewed certificates are used from the next call
    on. `connect_s`: least time that a try to connect has before calls fail. Raises ConfigError for plaintext to an address that
    is not loopback, unless it is meant to be `insecure`.
    """
    found = credentials or fixed(secret, role)
    made = _channel(address, found, peer, insecure, int(connect_s * 1000))
    return TokenChannel(made, found.metadata) if found.metadata() else made


def _channel(address: str, found: Credentials, peer: str, insecure: bool, connect_ms: int) -> grpc.aio.Channel:
    """`channel` without tokens."""
    options = [(name, connect_ms if name == "grpc.min_reconnect_backoff_ms" else value) for name, value in CLIENT_OPTIONS]
    named = [*options, ("grpc.ssl_target_name_override", tls.server_name(peer))]
    if found.certificates is not None:
        return RenewingChannel(
            found.certificates, lambda pems: grpc.aio.secure_channel(address, tls.channel_credentials(pems), named))
    if found.authority is not None:
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(found.authority.read_bytes()), named)
    if not insecure and not is_loopback(address):
        raise ConfigError(
            f"{address} is not loopback and would be plaintext: set security.tls_dir (--tls-dir) to a folder with certificates")
    return grpc.aio.insecure_channel(address, options)


async def call(method: Callable[..., Awaitable[T]], request: Any, timeout_s: float) -> T:
    """One unary call within a deadline. Raises SlipstreamError: what the handler raised, or Unavailable."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc_error(error) from None


async def stream(
    method: Callable[..., grpc.aio.UnaryStreamCall[Any, T]], request: Any, timeout_s: float
) -> AsyncGenerator[T, None]:
    """The messages of one server-streaming call within a deadline for the whole of it. Raises SlipstreamError, as `call`.

    Leaving the loop early cancels the call, at once when the generator is closed (contextlib.aclosing).
    """
    messages = method(request, timeout=timeout_s)
    try:
        async for message in messages:
            yield message
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc_error(error) from None
    finally:
        messages.cancel()


async def call_until(
    method: Callable[..., Awaitable[T]], request: Any, timeout_s: float, waits: Waits, what: str, clock: Clock,
    give_up_s: float | None = None, jitter: Callable[[], float] = random.random,
) -> T:
    """One unary call, retried for as long as it is Unavailable. Only for idempotent methods.

    Waits between tries: 0.05 s doubling to 2 s, times a random share (full jitter); at least the server's RetryInfo when it
    sends one. `what` names the wait in status and metrics. Raises other errors at once, Unavailable after `give_up_s`.
    """
    started, backoff_s = clock.monotonic(), _BACKOFF_S
    with waits.on(what) as wait:
        while True:
            # A try that lasts has reached somebody: the former error is over.
            over = asyncio.get_running_loop().call_later(_REACHED_S, setattr, wait, "sentence", what)
            try:
                return await call(method, request, timeout_s)
            except Unavailable as error:
                if give_up_s is not None and clock.monotonic() - started >= give_up_s:
                    raise
                wait.sentence = f"{what}: {error.message or error.reason}"
                pause_s = backoff_s * jitter()
                if error.retry_s is not None:
                    pause_s += error.retry_s
            finally:
                over.cancel()
            await clock.sleep(pause_s)
            backoff_s = min(backoff_s * 2, _BACKOFF_MOST_S)


class Server:
    """A gRPC server with health for each service, reflection, limits and error statuses.

    Example:
        async with Server("127.0.0.1", 0, [(add_XServicer_to_server, servicer)]) as server:
            server.address
    """

    def __init__(
        self, host: str, port: int, registrations: Sequence[Registration], secret: bytes = b"", grace_s: float = 5,
        observe: Observe | None = None, public: bool = False, credentials: Credentials | None = None, client_port: int = 0,
        health_port: int = 0,
    ) -> None:
        """`observe(method, code, seconds)` is told of every finished call. With certificates every caller shows one, but at
        `client_port` (0 = none), where a signed token is asked for instead. `health_port` (0 = none) serves health alone, in
        plaintext, for probes that speak nothing else.

        Raises ConfigError for a host that is not loopback without certificates, unless the server is meant to be `public`: an
        environment, which nobody needs a role for.
        """
        self._credentials = credentials or fixed(secret)
        if self._credentials.certificates is None:
            if not public and not is_loopback(_join(host, port)):
                raise ConfigError(
                    f"--host {host} is not loopback and plaintext is refused there: set security.tls_dir (--tls-dir) to a "
                    "folder with certificates, or use --host 127.0.0.1")
            if client_port:
                raise ConfigError(f"--client-port {client_port} needs certificates: set security.tls_dir (--tls-dir)")
        elif client_port and not self._credentials.keys.secrets:
            raise ConfigError(
                f"--client-port {client_port} asks for signed tokens, and there is no secret: set security.secret_file")
        self._host, self._port, self._registrations, self._grace_s = host, port, registrations, grace_s
        self._client_port, self._health_port = client_port, health_port
        self._boundary = Boundary(observe)
        self._guard = auth.RoleGuard(self._credentials) if self._credentials.checks else None
        self._server = grpc.aio.server(options=[*SERVER_OPTIONS, *(
            _SECURE_OPTIONS if self._credentials.certificates is not None else ())])
        self._probes = grpc.aio.server(options=SERVER_OPTIONS) if health_port else None
        self._health = HealthServicer()
        self._names: list[str] = []
        self._stopped = False
        self.address = ""

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen. Raises ConfigError when the port is taken."""
        serve = Registrar(self._server, self._served)
        for add, servicer in self._registrations:
            add(servicer, serve)
        self._names += serve.names
        names = [health_names.SERVICE_NAME, reflection.SERVICE_NAME, *self._names]
        for add, servicer in (
                (health_pb2_grpc.add_HealthServicer_to_server, self._health),
                (reflection_pb2_grpc.add_ServerReflectionServicer_to_server, reflection.aio.ReflectionServicer(names))):
            add(servicer, serve)
        await self.set_serving(True)
        certificates = self._credentials.certificates
        own = certificates.server_credentials() if certificates is not None else None
        port = self._listen(self._server, self._port, "--port", own)
        if self._client_port and certificates is not None:
            self._listen(self._server, self._client_port, "--client-port", certificates.server_credentials(ask_client=False))
        if self._probes is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probes)
            self._listen(self._probes, self._health_port, "--health-port", None)
            await self._probes.start()
        await self._server.start()
        self.address = _join(self._host, port)

    def _listen(self, server: grpc.aio.Server, port: int, option: str, credentials: grpc.ServerCredentials | None) -> int:
        """Bind a port, encrypted with credentials. Returns its number; raises ConfigError."""
        check_port(self._host, port, option)
        address = _join(self._host, port)
        try:
            return server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"{option} {port}: cannot listen on {self._host}: {error}") from None

    def _served(self, method: str, handler: Any) -> Any:
        """A method as it is served: checks around it, and around those what makes statuses of errors."""
        return self._boundary.around(method, self._guard.around(method, handler) if self._guard else handler)

    async def set_serving(self, serving: bool) -> None:
        """Health of every service: SERVING or NOT_SERVING. Calls are answered all the same."""
        states = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self) -> None:
        """Refuse new calls; give those in flight `grace_s` to end, then cancel them. Calling again does nothing."""
        if not self._stopped:
            self._stopped = True
            await self._server.stop(self._grace_s)
            if self._probes is not None:
                await self._probes.stop(0)


def check_port(host: str, port: int, option: str) -> None:
    """Raises ConfigError with the remedy when host:port cannot be listened on. gRPC itself only says that it failed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    except OSError as error:
        remedy = (
            f"port {port} on {host} is in use: stop the process that has it, or choose another with {option} (0 = a free one)"
            if error.errno == errno.EADDRINUSE
            else f"{option} {port}: cannot listen on {host}: {error.strerror}; choose another port (0 = a free one) or --host")
        raise ConfigError(remedy) from None


def _join(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether "host:port" or "unix:path" stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
