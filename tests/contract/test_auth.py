"""Each role may call what its job needs, and nothing else; a call without a token is refused before its method runs."""

import stat

import grpc
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream import auth, auth_credentials, errors, rpc
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.protos.buffer.v1 import (
    batches_pb2,
    batches_pb2_grpc,
    policy_pb2,
    policy_pb2_grpc,
    samples_pb2,
    samples_pb2_grpc,
    scores_pb2,
    scores_pb2_grpc,
)

SECRET = b"0123456789abcdef0123456789abcdef"


class Buffer(
    samples_pb2_grpc.SampleServiceServicer, scores_pb2_grpc.ScoreServiceServicer, batches_pb2_grpc.BatchServiceServicer,
    policy_pb2_grpc.PolicyServiceServicer,
):
    """Answers everything, and counts."""

    def __init__(self):
        self.calls = 0

    async def LeaseSamples(self, request, context):
        self.calls += 1
        return samples_pb2.LeaseSamplesResponse()

    async def LeaseUnscored(self, request, context):
        self.calls += 1
        return scores_pb2.LeaseUnscoredResponse()

    async def LeaseBatch(self, request, context):
        self.calls += 1
        return batches_pb2.LeaseBatchResponse()

    async def ReadBatch(self, request, context):
        self.calls += 1
        yield batches_pb2.ReadBatchResponse()

    async def ReserveVersion(self, request, context):
        self.calls += 1
        return policy_pb2.ReserveVersionResponse()

    async def WatchVersions(self, request, context):
        self.calls += 1
        yield policy_pb2.WatchVersionsResponse()


@pytest.fixture
async def buffer():
    """A server that wants tokens; yields (servicer, address)."""
    servicer = Buffer()
    add = [
        samples_pb2_grpc.add_SampleServiceServicer_to_server, scores_pb2_grpc.add_ScoreServiceServicer_to_server,
        batches_pb2_grpc.add_BatchServiceServicer_to_server, policy_pb2_grpc.add_PolicyServiceServicer_to_server]
    async with rpc.Server("127.0.0.1", 0, [(a, servicer) for a in add], secret=SECRET) as server:
        yield servicer, server.address


async def attempt(channel, name):
    """Call one method; the google.rpc code of the outcome and its reason."""
    stubs = {
        "LeaseSamples": (samples_pb2_grpc.SampleServiceStub, samples_pb2.LeaseSamplesRequest),
        "LeaseUnscored": (scores_pb2_grpc.ScoreServiceStub, scores_pb2.LeaseUnscoredRequest),
        "LeaseBatch": (batches_pb2_grpc.BatchServiceStub, batches_pb2.LeaseBatchRequest),
        "ReadBatch": (batches_pb2_grpc.BatchServiceStub, batches_pb2.ReadBatchRequest),
        "ReserveVersion": (policy_pb2_grpc.PolicyServiceStub, policy_pb2.ReserveVersionRequest),
        "WatchVersions": (policy_pb2_grpc.PolicyServiceStub, policy_pb2.WatchVersionsRequest),
    }
    stub, request = stubs[name]
    method = getattr(stub(channel), name)
    try:
        if name in ("ReadBatch", "WatchVersions"):
            assert len([m async for m in method(request(), timeout=5)]) == 1
        else:
            await rpc.call(method, request(), 5)
    except grpc.aio.AioRpcError as error:
        got = errors.from_rpc_error(error)
        return got.code, got.reason
    except SlipstreamError as got:
        return got.code, got.reason
    return code_pb2.OK, ""


METHODS = ["LeaseSamples", "LeaseUnscored", "LeaseBatch", "ReadBatch", "ReserveVersion", "WatchVersions"]


@pytest.mark.parametrize("role, allowed", [
    ("rollout", {"LeaseSamples", "WatchVersions"}), ("reward", {"LeaseUnscored", "WatchVersions"}),
    ("trainer", {"LeaseBatch", "ReadBatch", "ReserveVersion", "WatchVersions"}), ("cli", {"WatchVersions"})])
async def test_a_role_may_call_what_its_job_needs(buffer, role, allowed):
    """The whole table, unary and streaming; PERMISSION_DENIED names role and method, and the method never ran."""
    servicer, address = buffer
    async with rpc.channel(address, role, SECRET) as channel:
        outcomes = {name: await attempt(channel, name) for name in METHODS}
    denied = (code_pb2.PERMISSION_DENIED, "ROLE")
    assert outcomes == {name: (code_pb2.OK, "") if name in allowed else denied for name in METHODS}
    assert servicer.calls == len(allowed)


@pytest.mark.parametrize("role, secret, reason", [
    ("", b"", "TOKEN_MISSING"), ("trainer", b"another secret, just as long....", "TOKEN_INVALID"),
    ("admin", SECRET, "TOKEN_INVALID")])
async def test_without_a_valid_token_nothing_is_answered(buffer, role, secret, reason):
    """No token, a token of another run, a role that does not exist: UNAUTHENTICATED, with the reason in ErrorInfo."""
    servicer, address = buffer
    async with rpc.channel(address, role, secret) as channel:
        assert {await attempt(channel, name) for name in METHODS} == {(code_pb2.UNAUTHENTICATED, reason)}
    assert servicer.calls == 0


async def test_health_needs_no_token(buffer):
    """Kubernetes' probes have none."""
    async with rpc.channel(buffer[1]) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_role_cannot_pass_for_another():
    """The token covers the role: relabelling it does not help."""
    own = auth_credentials.fixed(SECRET, "rollout")
    stolen = own.metadata()[0][1].replace("rollout:", "trainer:")
    with pytest.raises(auth.Unauthenticated, match="token of role 'trainer' is not valid"):
        auth.identify("/slipstream.buffer.v1.BatchService/LeaseBatch", stolen, {}, own, now_unix=0)


def test_the_secret_is_made_once_and_only_for_its_owner(tmp_path):
    """Mode 600; asked for again it is the same; a run folder without one has none."""
    assert auth.read_secret(tmp_path) == b""
    secret = auth.create_secret(tmp_path)
    assert len(secret) == 64 and auth.create_secret(tmp_path) == secret == auth.read_secret(tmp_path)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("content, mode, says", [
    (b"x" * 64, 0o644, "can be read by others: chmod 600"), (b"short", 0o600, "holds 5 bytes, at least 16")])
def test_a_secret_that_is_none_is_refused(tmp_path, content, mode, says):
    """One line with the remedy."""
    (tmp_path / "secret").write_bytes(content)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=says):
        auth.read_secret(tmp_path)
