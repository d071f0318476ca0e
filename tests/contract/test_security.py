"""Who gets in, and how far: certificates, roles and the table of who may call what, on a real server with every RPC."""

import asyncio
import datetime
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from security_world import DAY, SECRET, World, attempt, methods, path_of

from slipstream import auth, auth_credentials, rpc, tls, tls_authority
from slipstream.errors import ConfigError
from tests.ports import free_port

# The contract as people read it; slipstream/auth.py has to say the same. x = may call.
MATRIX = """
                                                rollout reward trainer buffer environment client cli
    buffer.v1.SampleService/LeaseSamples           x      .       .      .         .        .     .
    buffer.v1.SampleService/HeartbeatSamples       x      .       .      .         .        .     .
    buffer.v1.SampleService/SubmitSamples          x      .       .      .         .        .     .
    buffer.v1.SampleService/StreamSamples          x      .       .      .         .        .     .
    buffer.v1.SampleService/SubmitPartials         x      .       .      .         .        .     .
    buffer.v1.SampleService/ReleaseSamples         x      .       .      .         .        .     .
    buffer.v1.ScoreService/LeaseUnscored           .      x       .      .         .        .     .
    buffer.v1.ScoreService/HeartbeatScoring        .      x       .      .         .        .     .
    buffer.v1.ScoreService/SubmitScores            .      x       .      .         .        .     .
    buffer.v1.BatchService/TakeIncarnation         .      .       x      .         .        .     .
    buffer.v1.BatchService/LeaseBatch              .      .       x      .         .        .     .
    buffer.v1.BatchService/ReadBatch               .      .       x      .         .        .     .
    buffer.v1.BatchService/CommitBatches           .      .       x      .         .        .     .
    buffer.v1.PolicyService/ReserveVersion         .      .       x      .         .        .     .
    buffer.v1.PolicyService/PublishVersion         .      .       x      .         .        .     .
    buffer.v1.PolicyService/WatchVersions          x      x       x      x         .        .     x
    buffer.v1.PolicyService/ListVersions           x      x       x      x         .        .     x
    buffer.v1.PolicyService/HoldVersion            x      x       x      x         .        .     x
    buffer.v1.LedgerService/GetBalance             x      x       x      x         .        .     x
    buffer.v1.LedgerService/ListDeadLetters        x      x       x      x         .        .     x
    buffer.v1.SessionService/OpenSession           .      .       .      .         .        x     .
    buffer.v1.SessionService/HeartbeatSession      .      .       .      .         .        x     .
    buffer.v1.SessionService/CloseSession          .      .       .      .         .        x     .
    rollout.v1.RolloutService/Generate             .      .       .      .         .        x     x
    rollout.v1.RolloutService/Drain                .      .       .      .         .        .     x
    rollout.v1.GroupService/Follow                 x      .       .      .         .        .     .
    rollout.v1.GroupService/Report                 x      .       .      .         .        .     .
    reward.v1.RewardService/ScoreTranscripts       x      x       .      .         .        x     x
    trainer.v1.TrainerService/GetProgress          x      x       x      x         .        .     x
    trainer.v1.TrainerService/RequestCheckpoint    .      .       .      .         .        .     x
    environment.v1.EnvironmentService/Describe     x      .       x      x         .        .     x
    environment.v1.EnvironmentService/Reset        x      .       x      .         .        .     x
    environment.v1.EnvironmentService/Step         x      .       .      .         .        .     x
    environment.v1.EnvironmentService/Close        x      .       x      .         .        .     x
    weights.v1.WeightService/ReadRange             x      .       .      .         .        .     .
    types.v1.StatusService/GetStatus               x      x       x      x         .        .     x
"""


def matrix() -> dict[str, set[str]]:
    """Method → roles."""
    head, *rows = (line.split() for line in MATRIX.strip().splitlines())
    return {
        f"slipstream.{name}": {role for role, mark in zip(head, marks, strict=True) if mark == "x"} for name, *marks in rows}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """One authority and a certificate per role for all tests of this file."""
    return World(tmp_path_factory.mktemp("certs"))


def status():
    """The one method that most roles may call."""
    return next(m for m in methods() if m.name == "GetStatus")


def test_a_method_that_nobody_thought_of_is_nobodys():
    """Every method of the protos is in the table, none is in it that does not exist, and what is not in it is refused."""
    assert {path_of(m) for m in methods()} == set(auth.ALLOWED), (
        "say in slipstream/auth.py, and in MATRIX here, which roles may call the new method")
    with pytest.raises(auth.PermissionDenied, match="in no role's table"):
        auth.authorise("/slipstream.buffer.v1.NewService/Anything", auth.Caller("cli", "certificate"))


@pytest.mark.parametrize("role", auth.ROLES)
@pytest.mark.parametrize("proof", ["certificate", "role token"])
async def test_every_role_tries_every_method(world: World, role: str, proof: str):
    """By certificate and by role token: exactly what the matrix says gets through, and a refused method never ran."""
    secret = b"" if proof == "certificate" else SECRET
    server = {} if proof == "certificate" else {"credentials": auth_credentials.fixed(SECRET)}
    world.everything.calls.clear()
    own = auth_credentials.fixed(secret, role) if secret else world.credentials(role)
    async with world.server(**server), world.channel(own) as channel:
        outcomes = {path_of(m): await attempt(channel, m) for m in methods()}
    missing = "TOKEN_MISSING" if proof == "certificate" else "TOKEN_INVALID"
    refused = (code_pb2.UNAUTHENTICATED, missing) if role == "client" else (code_pb2.PERMISSION_DENIED, "ROLE")
    allowed = {name for name, roles in matrix().items() if role in roles and role != "client"}
    assert outcomes == {name: (code_pb2.OK, "") if name in allowed else refused for name in matrix()}
    assert sorted(world.everything.calls) == sorted(allowed)


async def test_a_refusal_names_role_method_and_remedy(world: World):
    """What a person needs to mend it, without opening the source."""
    async with world.server(), world.channel(world.credentials("rollout")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/slipstream.buffer.v1.BatchService/CommitBatches")(b"", timeout=5)
    assert refused.value.details() == (
        "/slipstream.buffer.v1.BatchService/CommitBatches is for trainer, not for role rollout (by certificate): call it with "
        "the certificate or token of a role that may")


@pytest.mark.parametrize("name, how, outcome", [
    ("expired", {"lifetime": -DAY / 24 / 60, "starts": datetime.datetime.now(datetime.UTC) - DAY}, "handshake"),
    ("not-yet", {"starts": datetime.datetime.now(datetime.UTC) + DAY}, "handshake"),
    ("wrong-authority", {"authority": tls_authority.create_authority("another")}, "handshake"),
    ("no-uri", {"uris": ()}, "CERTIFICATE_ROLE"),
    ("unknown-role", {"uris": ("spiffe://slipstream/admin",)}, "CERTIFICATE_ROLE"),
    ("two-roles", {"uris": ("spiffe://slipstream/trainer", "spiffe://slipstream/cli")}, "CERTIFICATE_ROLE"),
    ("another-run", {"run": "other"}, "CERTIFICATE_ROLE"),
    ("another-domain", {"uris": ("spiffe://elsewhere/trainer",)}, "CERTIFICATE_ROLE"),
    ("this-run", {"run": "demo"}, ""),
])
async def test_certificates_that_are_not_good_enough(world: World, name: str, how: dict, outcome: str):
    """Expired, of another authority, of another run, of no role: refused before any method runs; the right one is let in."""
    world.everything.calls.clear()
    async with world.server(), world.channel(world.odd(name, **how)) as channel:
        code, reason = await attempt(channel, status())
    want = {"handshake": (code_pb2.UNAVAILABLE, "UNAVAILABLE"), "": (code_pb2.OK, "")}
    assert (code, reason) == want.get(outcome, (code_pb2.UNAUTHENTICATED, outcome))
    assert len(world.everything.calls) == (outcome == "")


async def test_without_a_certificate_nobody_gets_in(world: World):
    """TLS that trusts the server but shows nothing, and plaintext: both end in the handshake; health is no exception."""
    nothing = auth_credentials.Credentials("trainer", authority=world.folder / "trainer" / "ca.crt")
    async with world.server() as server:
        for open_channel in (lambda: world.channel(nothing), lambda: grpc.aio.insecure_channel(server.address)):
            async with open_channel() as channel:
                assert await attempt(channel, status()) == (code_pb2.UNAVAILABLE, "UNAVAILABLE")
                with pytest.raises(grpc.aio.AioRpcError):
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)


async def test_a_caller_knows_the_role_of_the_server(world: World):
    """A rollout worker's certificate does not make a buffer: the caller refuses to send it anything."""
    world.everything.calls.clear()
    async with world.server(credentials=world.credentials("rollout")):
        async with world.channel(world.credentials("trainer"), peer="buffer") as channel:
            assert await attempt(channel, status()) == (code_pb2.UNAVAILABLE, "UNAVAILABLE")
        async with world.channel(world.credentials("trainer"), peer="rollout") as channel:
            assert await attempt(channel, status()) == (code_pb2.OK, "")
    assert len(world.everything.calls) == 1


async def test_probes_have_a_port_of_their_own(world: World):
    """Kubernetes' probes speak plaintext and have no certificate: health alone is served to them, and follows the service."""
    port = free_port()
    async with world.server(health_port=port) as server, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub, states = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == states.SERVING
        await server.set_serving(False)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == states.NOT_SERVING
        assert (await attempt(channel, status()))[0] == code_pb2.UNIMPLEMENTED


def test_plaintext_stays_on_this_machine(world: World):
    """A secret is no excuse: both ends refuse, and name the setting."""
    fixed = auth_credentials.fixed(SECRET, "rollout")
    with pytest.raises(ConfigError, match=r"--host 0.0.0.0 is not loopback .*security.tls_dir \(--tls-dir\)"):
        rpc.Server("0.0.0.0", 0, [], credentials=fixed)
    with pytest.raises(ConfigError, match="10.0.0.7:1 is not loopback and would be plaintext: set security.tls_dir"):
        rpc.channel("10.0.0.7:1", credentials=fixed)
    with pytest.raises(ConfigError, match="--client-port 5 needs certificates"):
        rpc.Server("127.0.0.1", 0, [], credentials=fixed, client_port=5)
    with pytest.raises(ConfigError, match="asks for signed tokens, and there is no secret"):
        rpc.Server("127.0.0.1", 0, [], credentials=world.credentials("buffer"), client_port=5)


async def test_with_certificates_the_whole_network_is_listened_on(world: World):
    """What a pod does."""
    async with rpc.Server("0.0.0.0", 0, [(world.everything.add, None)], credentials=world.credentials("buffer")) as server:
        world.address = server.address
        async with world.channel(world.credentials("cli")) as channel:
            assert await attempt(channel, status()) == (code_pb2.OK, "")


@pytest.mark.parametrize("spoil, says", [
    (lambda d: (d / "ca.crt").unlink(), "ca.crt does not exist"),
    (lambda d: (d / "tls.key").chmod(0o644), "tls.key can be read by others: chmod 600"),
    (lambda d: (d / "tls.crt").write_text("nonsense"), "are not PEM files that belong together"),
    (lambda d: (d / "tls.crt").write_bytes((d.parent / "cli" / "tls.crt").read_bytes()), "that belong together"),
])
def test_files_that_cannot_be_certificates(tmp_path: Path, spoil, says: str):
    """One line with the remedy at start, not a handshake that fails later."""
    authority = tls_authority.create_authority()
    for role in ("rollout", "cli"):
        tls_authority.issue(authority, tmp_path / role, role)
    spoil(tmp_path / "rollout")
    with pytest.raises(ConfigError, match=says):
        tls.Certificates(tmp_path, "rollout")


def test_a_mounted_secret_is_a_folder_without_roles(tmp_path: Path):
    """cert-manager's Secret holds one role's files; renewed ones that do not fit each other are left alone, then taken."""
    authority = tls_authority.create_authority()
    tls_authority.issue(authority, tmp_path, "rollout")
    certificates = tls.Certificates(tmp_path, "rollout")
    first, key = certificates.current(), (tmp_path / "tls.key").read_bytes()
    tls_authority.issue(authority, tmp_path, "rollout")
    renewed = (tmp_path / "tls.key").read_bytes()
    (tmp_path / "tls.key").write_bytes(key)  # half of a renewal
    assert certificates.current() is first
    (tmp_path / "tls.key").write_bytes(renewed)
    assert certificates.current().key == renewed
    (tmp_path / "tls.crt").unlink()
    assert certificates.current().key == renewed


async def test_certificates_are_renewed_under_load_without_a_failed_call(world: World, tmp_path: Path):
    """Leaves, then the authority itself (old and new together, new leaves, new alone), while eight callers never stop."""
    own = World(tmp_path)
    done, calls, failures = asyncio.Event(), [0] * 8, []

    async def caller(i: int, channel: grpc.aio.Channel) -> None:
        while not done.is_set():
            outcome = await attempt(channel, status())
            calls[i] += 1
            if outcome != (code_pb2.OK, ""):
                failures.append(outcome)

    async def progress() -> None:
        """Every caller has begun and ended a call since now."""
        before = list(calls)
        async with asyncio.timeout(20):
            while any(now < then + 2 for now, then in zip(calls, before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def renew(authority: tls_authority.Authority, trusted: bytes) -> None:
        for role in ("buffer", "trainer"):
            tls_authority.issue(authority, tmp_path / role, role, trusted=trusted)

    async with own.server(), own.channel(own.credentials("trainer")) as channel:
        callers = [asyncio.create_task(caller(i, channel)) for i in range(8)]
        await progress()
        old, new = own.authority, tls_authority.create_authority("the next")
        both = old.pem + new.pem
        for authority, trusted in [(old, old.pem), (old, both), (new, both), (new, new.pem), (new, new.pem)]:
            renew(authority, trusted)
            await progress()
            assert own.everything.shown == (tmp_path / "trainer" / "tls.crt").read_bytes()  # the callers have followed
        stranger = own.credentials("trainer", world.folder)  # of an authority that was never trusted here
        old_one = tmp_path / "kept"
        tls_authority.issue(old, old_one, "trainer", trusted=new.pem)
        async with own.channel(stranger) as refused, own.channel(own.credentials("trainer", old_one)) as outdated:
            assert (await attempt(refused, status()))[0] == code_pb2.UNAVAILABLE
            assert (await attempt(outdated, status()))[0] == code_pb2.UNAVAILABLE  # the server has followed, too
        done.set()
        await asyncio.gather(*callers)
        assert failures == [] and len(channel._in_flight) == 1  # the channels of former certificates are closed


