"""gRPC between real servers and clients on loopback: errors keep their kind, restarts are ridden out, a drain is seen."""

import asyncio
import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream import errors, rpc
from slipstream.errors import (
    ConfigError,
    Conflict,
    Exhausted,
    Fenced,
    InvalidInput,
    NotFound,
    OutOfRange,
    SlipstreamError,
    Unavailable,
)
from slipstream.lifecycle import SystemClock, Waits
from slipstream.protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from slipstream.protos.types.v1 import sample_pb2, status_pb2, status_pb2_grpc, tensor_pb2

STATUS = "slipstream.types.v1.StatusService"


class Scripted(status_pb2_grpc.StatusServiceServicer, rollout_pb2_grpc.RolloutServiceServicer):
    """Answers with `reply()`, which may raise; streams two messages before it does."""

    def __init__(self, reply=lambda: None):
        self.reply, self.calls, self.cancelled = reply, 0, asyncio.Event()

    async def GetStatus(self, request, context):
        self.calls += 1
        try:
            result = self.reply()
            if asyncio.iscoroutine(result):
                await result
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return status_pb2.GetStatusResponse(run="demo")

    async def Generate(self, request, context):
        for _ in range(2):
            yield rollout_pb2.GenerateResponse(tokens=tensor_pb2.Tensor(data=request.prompt.data))
        self.reply()
        yield rollout_pb2.GenerateResponse(finish_reason=sample_pb2.FINISH_REASON_STOP)


def server(servicer, port=0, **settings):
    registrations = [
        (status_pb2_grpc.add_StatusServiceServicer_to_server, servicer),
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)]
    return rpc.Server("127.0.0.1", port, registrations, **settings)


async def get_status(address, timeout_s=5.0):
    async with rpc.channel(address) as channel:
        return await rpc.call(status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), timeout_s)


def raising(error):
    def reply():
        raise error
    return reply


ERRORS = [
    InvalidInput("segments[0].tokens is empty", "EMPTY_TOKENS", field="segments[0]"), NotFound("no such version", version=3),
    OutOfRange("batch 9 is above the next batch 4"), Fenced("incarnation 2 is older than 3", "FENCED", incarnation=2),
    Conflict("another body is there"), Unavailable("not ready", retry_s=0.25),
    Exhausted("no room", "QUOTA", retry_s=1.5, bytes=7)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
async def test_an_error_is_the_same_at_the_caller(error):
    """Kind, message, reason, metadata and retry delay cross the wire, for unary and for streaming methods."""
    async with server(Scripted(raising(error))) as running, rpc.channel(running.address) as channel:
        with pytest.raises(type(error)) as unary:
            await rpc.call(status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 5)
        messages, generate = [], rollout_pb2_grpc.RolloutServiceStub(channel).Generate
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for message in generate(rollout_pb2.GenerateRequest(), timeout=5):
                messages.append(message)
        assert len(messages) == 2
        for got in (unary.value, errors.from_rpc_error(streamed.value)):
            assert (type(got), got.message, got.reason, got.metadata, got.retry_s) == (
                type(error), error.message, error.reason, error.metadata, error.retry_s)


async def test_a_stream_raises_our_errors_and_may_be_left():
    """`rpc.stream` gives messages until the call fails; leaving it early cancels the call."""
    async with server(Scripted(raising(Fenced("newer")))) as running, rpc.channel(running.address) as channel:
        generate, got = rollout_pb2_grpc.RolloutServiceStub(channel).Generate, []
        with pytest.raises(Fenced, match="newer"):
            async for message in rpc.stream(generate, rollout_pb2.GenerateRequest(), 5):
                got.append(message)
        assert len(got) == 2
        async with contextlib.aclosing(rpc.stream(generate, rollout_pb2.GenerateRequest(), 5)) as messages:
            async for _ in messages:
                break


async def test_a_bug_is_internal_and_logged_with_its_traceback(caplog):
    """The caller learns what went wrong in one line, is not told to retry, and the server's log has the place."""
    async with server(Scripted(raising(ZeroDivisionError("division by zero")))) as running:
        with pytest.raises(SlipstreamError, match="ZeroDivisionError: division by zero") as got:
            await get_status(running.address)
    assert type(got.value) is SlipstreamError and got.value.code == grpc.StatusCode.INTERNAL.value[0]
    (record,) = [r for r in caplog.records if "GetStatus failed" in r.getMessage()]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


async def test_a_deadline_is_kept():
    """A handler that hangs is Unavailable at the caller after the deadline, and cancelled at the server; nothing is logged."""
    servicer = Scripted(lambda: asyncio.Event().wait())
    async with server(servicer) as running:
        with pytest.raises(Unavailable) as got:
            await get_status(running.address, timeout_s=0.1)
        assert got.value.reason == "DEADLINE_EXCEEDED"
        async with asyncio.timeout(5):
            await servicer.cancelled.wait()


async def test_large_messages_pass_and_too_large_ones_are_not_retried():
    """gRPC's default limit is 4 MB, ours 64 MB. Beyond it the answer is an error that no retry can heal."""
    async with server(Scripted()) as running, rpc.channel(running.address) as channel:
        generate = rollout_pb2_grpc.RolloutServiceStub(channel).Generate
        request = rollout_pb2.GenerateRequest(prompt=tensor_pb2.Tensor(data=b"x" * (8 << 20)))
        sizes = [len(m.tokens.data) async for m in generate(request, timeout=20)]
        assert sizes == [8 << 20, 8 << 20, 0]
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            async for _ in generate(rollout_pb2.GenerateRequest(prompt=tensor_pb2.Tensor(data=bytes(65 << 20))), timeout=20):
                pass
        got = errors.from_rpc_error(streamed.value)
        assert not isinstance(got, Unavailable) and got.reason == "RESOURCE_EXHAUSTED"


async def test_a_restart_of_the_server_is_ridden_out():
    """A long poll is cut by its server's restart on the same port; the call goes on by itself and shows what it waits for."""
    waits, first, second = Waits(SystemClock()), Scripted(lambda: asyncio.Event().wait()), Scripted()
    async with server(first, grace_s=0) as running:
        port = int(running.address.rpartition(":")[2])
        async with rpc.channel(running.address) as channel:
            pending = asyncio.create_task(rpc.call_until(
                status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 30, waits, "a status",
                SystemClock()))
            await wait_until(lambda: first.calls == 1)
            assert waits.current is not None and waits.current[0] == "a status"
            await running.stop()
            await wait_until(lambda: waits.current is not None and waits.current[0].startswith("a status: "))
            async with server(second, port) as again:
                assert again.address == running.address
                assert (await asyncio.wait_for(pending, 10)).run == "demo"
    assert (first.calls, second.calls) == (1, 1) and waits.current is None


class HandClock(SystemClock):
    """Records pauses instead of making them."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def monotonic(self):
        return self.now

    async def sleep(self, seconds):
        self.pauses.append(round(seconds, 6))
        self.now += seconds


async def test_retries_back_off_and_give_up_when_told():
    """0.05 s doubling to 2 s, times a random share, plus the server's own delay; after `give_up_s` the error is raised."""
    clock, share = HandClock(), iter([1.0, 0.5, 0.0] + [1.0] * 20)

    async def busy(request, timeout):
        raise Unavailable("busy", retry_s=None if len(clock.pauses) != 1 else 10.0)

    with pytest.raises(Unavailable, match="busy"):
        await rpc.call_until(busy, None, 1, Waits(clock), "x", clock, give_up_s=16, jitter=lambda: next(share))
    assert clock.pauses == [0.05, 10.05, 0.0, 0.4, 0.8, 1.6, 2.0, 2.0]


@pytest.mark.parametrize("error", [Fenced("newer"), InvalidInput("bad"), SlipstreamError("bug")])
async def test_other_errors_are_not_retried(error):
    """What a retry cannot heal is raised at once."""
    servicer = Scripted(raising(error))
    async with server(servicer) as running, rpc.channel(running.address) as channel:
        with pytest.raises(type(error)):
            await rpc.call_until(
                status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 5, Waits(SystemClock()),
                "x", SystemClock())
    assert servicer.calls == 1


async def test_health_is_told_for_each_service_and_flips_on_drain():
    """SERVING until the drain begins; then NOT_SERVING, at once for those who watch, while calls are still answered."""
    serving, draining = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with server(Scripted()) as running, rpc.channel(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("", STATUS, "slipstream.rollout.v1.RolloutService")
        for name in names:
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status == serving
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=STATUS), timeout=5)
        assert (await watch.read()).status == serving
        await running.set_serving(False)
        assert (await watch.read()).status == draining
        for name in names:
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status == draining
        assert (await get_status(running.address)).run == "demo"


async def test_reflection_lists_the_services():
    """So that grpcurl and its like work without protos at hand."""
    async with server(Scripted()) as running, rpc.channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        stream = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        reply = await stream.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {STATUS, "slipstream.rollout.v1.RolloutService", "grpc.health.v1.Health"} <= names


@pytest.mark.slow
async def test_the_server_permits_the_clients_keepalive_pings():
    """Pings every second, gRPC's fastest, make a default server end the long poll after the fourth. Ours permits them."""
    done = asyncio.Event()
    options = [*(o for o in rpc.CLIENT_OPTIONS if o[0] != "grpc.keepalive_time_ms"), ("grpc.keepalive_time_ms", 10)]
    default = grpc.aio.server()
    status_pb2_grpc.add_StatusServiceServicer_to_server(Scripted(done.wait), default)
    port = default.add_insecure_port("127.0.0.1:0")
    await default.start()

    async def poll(address):
        async with grpc.aio.insecure_channel(address, options) as channel:
            return await rpc.call(status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 30)

    async with server(Scripted(done.wait)) as running:
        polling = asyncio.create_task(poll(running.address))
        with pytest.raises(Unavailable, match="[Tt]oo many pings"):
            await poll(f"127.0.0.1:{port}")
        done.set()
        assert (await polling).run == "demo"
    await default.stop(None)


async def test_a_port_in_use_is_one_line_with_the_remedy(capfd):
    """Also when two servers would share it silently by SO_REUSEPORT."""
    async with server(Scripted()) as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use: stop .* --port \(0 = a free one\)"):
            await server(Scripted(), port).start()
    assert capfd.readouterr().err == ""


async def test_no_certificates_no_open_port():
    """Plaintext stays on this machine, with or without a secret; an environment may be public."""
    for host in ("0.0.0.0", "127.example.com", "::"):
        with pytest.raises(ConfigError, match="is not loopback and plaintext is refused there: set security.tls_dir"):
            rpc.Server(host, 0, [], secret=b"s" * 32)
    async with rpc.Server("::1", 0, []) as running:
        assert running.address.startswith("[::1]:")
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1"):
        await rpc.Server("192.0.2.1", 0, [], public=True).start()
    async with rpc.Server("0.0.0.0", 0, [], public=True) as running:
        assert running.address.startswith("0.0.0.0:")


async def test_every_call_is_timed_by_method_and_code():
    """`observe` hears of each finished call, errors included."""
    seen = []
    servicer = Scripted()
    async with server(servicer, observe=lambda *call: seen.append(call)) as running:
        await get_status(running.address)
        servicer.reply = raising(Fenced("newer"))
        with pytest.raises(Fenced):
            await get_status(running.address)
    assert [call[:2] for call in seen] == [(f"/{STATUS}/GetStatus", "OK"), (f"/{STATUS}/GetStatus", "FAILED_PRECONDITION")]
    assert all(0 <= call[2] < 5 for call in seen)


@pytest.mark.parametrize("value", [0.0, 1.5, 0.000000001, 86400.25])
def test_durations_survive(value):
    """Seconds as float and back."""
    assert rpc.seconds(rpc.duration(value)) == value


async def wait_until(condition, timeout_s=10.0):
    """Give the loop turns until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.002)
