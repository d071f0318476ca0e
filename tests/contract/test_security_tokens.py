"""Outside clients: a signed token says who, which role, until when and how much; over it they are told when to come back."""

import base64
import json
import time

import grpc
import pytest
from google.rpc import code_pb2
from security_world import SECRET, World, attempt, methods

from slipstream import rpc
from slipstream.auth_credentials import Credentials
from slipstream.auth_quotas import Quotas
from slipstream.auth_tokens import RELOAD_S, Claims, Keys, Unauthenticated, sign, verify
from slipstream.cli.certificates import duration_s, token
from slipstream.errors import ConfigError, Exhausted, InvalidInput
from slipstream.protos.buffer.v1 import sessions_pb2, sessions_pb2_grpc
from tests.ports import free_port

CLIENT = Claims("lab", "client", 2_000_000_000)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One authority for all tests of this file."""
    return World(tmp_path_factory.mktemp("certs"))


def method(name: str):
    """A method of the contract by its name."""
    return next(m for m in methods() if m.name == name)


def outside(world: World, text: str) -> Credentials:
    """A program with a token and the authority's file, without a certificate."""
    return Credentials("client", token=text, authority=world.folder / "client" / "ca.crt")


@pytest.mark.parametrize("text, outcomes", [
    (sign(CLIENT, SECRET), {"OpenSession": "", "Generate": "", "LeaseBatch": "ROLE", "GetStatus": "ROLE"}),
    (sign(Claims("me", "cli", 2_000_000_000), SECRET), {"GetStatus": "", "Drain": "", "OpenSession": "ROLE"}),
    (sign(Claims("lab", "client", int(time.time()) - 1), SECRET), {"OpenSession": "TOKEN_EXPIRED"}),
    (sign(CLIENT, b"another secret, just as long...."), {"OpenSession": "TOKEN_INVALID"}),
    ("", {"OpenSession": "TOKEN_MISSING"}),
])
async def test_the_port_of_outside_clients_wants_a_token(world: World, text: str, outcomes: dict[str, str]):
    """No certificate there, so a signed token decides; the table holds for its role as for any other."""
    port = free_port()
    keys = Keys(fixed=(SECRET,))
    async with world.server(credentials=world.credentials("buffer", keys=keys), client_port=port):
        async with rpc.channel(f"127.0.0.1:{port}", credentials=outside(world, text)) as channel:
            assert {name: (await attempt(channel, method(name)))[1] for name in outcomes} == outcomes
        async with rpc.channel(world.address, credentials=outside(world, text)) as channel:  # the other port wants certificates
            assert (await attempt(channel, method("GetStatus")))[0] == code_pb2.UNAVAILABLE


async def test_a_certificate_of_a_client_needs_a_token_of_a_client(world: World):
    """The certificate alone has no quota; a token of another role does not widen it; a role token is no signed token."""
    async with world.server(credentials=world.credentials("buffer", keys=Keys(fixed=(SECRET,)))):
        for text, reason in [(sign(CLIENT, SECRET), ""), (sign(Claims("x", "cli", 2_000_000_000), SECRET), "TOKEN_ROLE"),
                             ("", "TOKEN_MISSING")]:
            async with world.channel(world.credentials("client", token=text)) as channel:
                assert (await attempt(channel, method("OpenSession")))[1] == reason


async def test_a_role_token_opens_nothing_over_the_network(world: World):
    """Whoever has the secret of a laptop run cannot pass for a trainer where certificates are in force."""
    keys, port = Keys(fixed=(SECRET,)), free_port()

    class Sends(Credentials):
        def metadata(self):
            return Credentials("trainer", keys=keys).metadata()

    async with world.server(credentials=world.credentials("buffer", keys=keys), client_port=port):
        sends = Sends("trainer", authority=world.folder / "trainer" / "ca.crt")
        async with rpc.channel(f"127.0.0.1:{port}", credentials=sends) as channel:
            assert await attempt(channel, method("LeaseBatch")) == (code_pb2.UNAUTHENTICATED, "TOKEN_MISSING")


async def test_over_its_quota_a_client_is_told_when_to_come_back(world: World):
    """Calls and bytes a minute, of the token or else of the run file: RESOURCE_EXHAUSTED with RetryInfo, for it alone."""
    mine = world.credentials("buffer", keys=Keys(fixed=(SECRET,)), calls_per_minute=1000, bytes_per_minute=1000)
    few, big = Claims("few", "client", 2_000_000_000, calls_per_minute=2), Claims("big", "client", 2_000_000_000)
    async with world.server(credentials=mine):
        async with world.channel(world.credentials("client", token=sign(few, SECRET))) as channel:
            stub = sessions_pb2_grpc.SessionServiceStub(channel)
            await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(), 5)
            await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(), 5)
            with pytest.raises(Exhausted, match=r"few has used its quota of 2 calls a minute: come back") as refused:
                await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(), 5)
            assert 25 < (refused.value.retry_s or 0) <= 30 and refused.value.reason == "QUOTA"
        async with world.channel(world.credentials("client", token=sign(big, SECRET))) as channel:
            stub = sessions_pb2_grpc.SessionServiceStub(channel)
            await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(client="x" * 800), 5)
            with pytest.raises(Exhausted, match="1000 bytes a minute"):
                await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(client="x" * 800), 5)
            with pytest.raises(InvalidInput, match="a message of 1203 bytes is over the quota of big"):
                await rpc.call(stub.OpenSession, sessions_pb2.OpenSessionRequest(client="x" * 1200), 5)
        async with world.channel(world.credentials("cli")) as channel:
            assert (await attempt(channel, method("GetStatus")))[0] == code_pb2.OK


async def test_a_process_of_the_run_may_have_a_limit_too(world: World):
    """By role and address, off unless set: a worker that runs wild is slowed down, the others at that address are not."""
    mine = world.credentials("buffer", own_calls_per_minute=2)
    async with world.server(credentials=mine):
        for role, outcomes in [("rollout", ["", "", "QUOTA"]), ("reward", [""])]:
            async with world.channel(world.credentials(role)) as channel:
                assert [(await attempt(channel, method("GetStatus")))[1] for _ in outcomes] == outcomes


def test_a_bucket_fills_evenly_and_answers_are_paid_for():
    """Half a minute gives back half the quota; an answer over what is left is a debt; 0 is no limit."""
    now = [0.0]
    quotas = Quotas(lambda: now[0])
    for _ in range(4):
        quotas.take("a", 4, 100, 10)
    with pytest.raises(Exhausted):
        quotas.take("a", 4, 100, 10)
    now[0] = 30
    quotas.take("a", 4, 100, 10)
    quotas.charge("a", 200)
    with pytest.raises(Exhausted, match="100 bytes a minute") as refused:
        quotas.take("a", 4, 100, 10)
    now[0] += refused.value.retry_s or 0
    quotas.take("a", 4, 100, 10)
    for _ in range(100):
        quotas.take("b", 0, 0, 1 << 30)


def test_a_secret_is_changed_without_an_interruption(tmp_path):
    """New below old, new on top, old gone: a token of either is good for as long as its secret is in the file."""
    now, path = [0.0], tmp_path / "secret"
    old, new = b"o" * 32, b"n" * 32
    path.touch(0o600)

    def write(*secrets: bytes) -> None:
        path.write_bytes(b"\n".join(secrets) + b"\n")
        now[0] += RELOAD_S

    write(old)
    keys = Keys(path, clock=lambda: now[0])
    for secrets, good, bad in [((old, new), (old, new), ()), ((new, old), (new, old), ()), ((new,), (new,), (old,))]:
        write(*secrets)
        for secret in good:
            assert verify(sign(CLIENT, secret), keys.secrets, 0) == CLIENT
        for secret in bad:
            with pytest.raises(Unauthenticated, match="not made by a secret of this run"):
                verify(sign(CLIENT, secret), keys.secrets, 0)
        assert keys.secrets[0] == secrets[0]
    write(b"short")
    assert keys.secrets == (new,)  # a slip does not open the service, nor close it
    path.unlink()
    now[0] += RELOAD_S
    assert keys.secrets == (new,)


def test_claims_cannot_be_changed():
    """A longer life or a larger quota breaks the signature; services have no signed tokens."""
    body, _, signature = sign(CLIENT, SECRET).partition(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    longer = base64.urlsafe_b64encode(json.dumps({**claims, "expires_unix": 3_000_000_000}).encode()).decode().rstrip("=")
    with pytest.raises(Unauthenticated):
        verify(f"{longer}.{signature}", (SECRET,), 0)
    with pytest.raises(Unauthenticated, match="ended 1 s ago"):
        verify(f"{body}.{signature}", (SECRET,), CLIENT.expires_unix + 1)
    with pytest.raises(ConfigError, match="role 'trainer' cannot have a signed token"):
        sign(Claims("x", "trainer", 2_000_000_000), SECRET)


def test_the_command_prints_a_token_alone(tmp_path, capsys):
    """For $(slipstream token ...); bad durations and a missing secret are one line."""
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_bytes(SECRET)
    token(tmp_path / "secret", "client", "lab", "15m", 10, 2000)
    claims = verify(capsys.readouterr().out.strip(), (SECRET,), time.time())
    assert (claims.name, claims.calls_per_minute, claims.bytes_per_minute) == ("lab", 10, 2000)
    assert 880 < claims.expires_unix - time.time() <= 900
    with pytest.raises(ConfigError, match="does not exist: name the run's secret"):
        token(tmp_path / "none", "client", "lab", "15m", 0, 0)
    with pytest.raises(ConfigError, match="--ttl '1 hour' is not a duration"):
        duration_s("1 hour", "--ttl")


async def test_without_certificates_a_client_still_needs_a_signed_token(world: World):
    """On a laptop, too: the run's secret makes role tokens for services, never for programs outside."""
    credentials = Credentials("buffer", keys=Keys(fixed=(SECRET,)))
    async with world.server(credentials=credentials):
        for own, reason in [(Credentials("client", keys=Keys(fixed=(SECRET,))), "TOKEN_INVALID"),
                            (Credentials("client", token=sign(CLIENT, SECRET)), "")]:
            async with rpc.channel(world.address, credentials=own) as channel:
                assert isinstance(channel, grpc.aio.Channel)
                assert (await attempt(channel, method("OpenSession")))[1] == reason
