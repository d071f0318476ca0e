"""An environment as a server of its own: how it is found, what it says of itself, what its absence and its restart mean."""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest
from environment_cases import Guess
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from slipstream import auth, config, rpc
from slipstream.environment import Action, EpisodeReset, EpisodeStep, Reset, Task, connect, describe
from slipstream.environments.remote import RemoteEnvironment
from slipstream.environments.server import EnvironmentServer
from slipstream.errors import ConfigError, NotFound, SlipstreamError
from slipstream.lifecycle import SystemClock, Waits
from slipstream.protos.environment.v1 import environment_pb2 as pb
from slipstream.protos.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from slipstream.protos.types.v1 import sample_pb2, status_pb2, status_pb2_grpc
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "own-environment"


def at(address: str, **more) -> config.Environment:
    return config.Environment(name="far", address=address, **more)


@contextlib.asynccontextmanager
async def served(entry: str, folder: Path, *options: str, stderr: int | None = None):
    """`slipstream env serve entry` in `folder`; yields (process, the line that it prints)."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("slipstream"), "env", "serve", entry, *options, cwd=folder,
        stdout=asyncio.subprocess.PIPE, stderr=stderr)
    try:
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        yield process, line
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_ten_lines_are_an_environment():
    """The example file has at most ten lines, serves by one command, answers a run, and stops on Ctrl-C with exit code 0."""
    assert len((EXAMPLE / "my_env.py").read_text().splitlines()) <= 10
    async with served("my_env:Reverse", EXAMPLE) as (process, line):
        assert line.startswith("environment Reverse (a task for every index, scorer exact) at 127.0.0.1:")
        async with connect(at(line.split()[-1])) as client:
            assert (client.description.scorer, client.description.tasks) == ("exact", 0)
            [reset] = await client.reset([EpisodeReset("e", Task(5, 9))])
            assert reset.text == reset.answer[::-1] + "=" and reset.scorer == "exact"
            [step] = await client.step([EpisodeStep("e", 1, Action(reset.answer))])
            assert step.done and step.reward is None
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_health_reflection_and_status():
    """What probes and tools ask of every service, an environment answers too."""
    async with EnvironmentServer(Guess(), name="guess") as server, rpc.channel(server.address) as channel:
        health = await rpc.call(
            health_pb2_grpc.HealthStub(channel).Check,
            health_pb2.HealthCheckRequest(service="slipstream.environment.v1.EnvironmentService"), 5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = [s.name async for reply in listing for s in reply.list_services_response.service]
        assert {"slipstream.environment.v1.EnvironmentService", "slipstream.types.v1.StatusService"} <= set(names)
        assert set(names) >= auth.OPEN  # what anybody may ask is what is served, reflection of one version
        async with connect(at(server.address)) as client:
            await client.reset([EpisodeReset("a", Task(0, 0)), EpisodeReset("b", Task(1, 0))])
            await client.close(["a"])
        status = await rpc.call(status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 5)
        assert (status.service, status.instance, status.state) == ("environment", "guess", "serving")
        assert status.figures == {"episodes_open": 1, "episodes_started": 2, "episodes_failed": 0}


async def test_an_environment_that_is_down_is_one_line_with_the_remedy():
    """Nothing listens; or what listens is no environment."""
    port = free_port()
    with pytest.raises(ConfigError) as caught:
        async with RemoteEnvironment(at(f"127.0.0.1:{port}"), start_s=0.2):
            pass
    assert f"environments.address = '127.0.0.1:{port}'" in caught.value.message and "\n" not in caught.value.message
    assert "start it with `slipstream env serve module:Class --port N`" in caught.value.message
    async with rpc.Server("127.0.0.1", 0, []) as other:
        with pytest.raises(ConfigError, match="no environment answers"):
            await describe(at(other.address))


async def test_plaintext_beyond_this_machine_has_to_be_allowed():
    """Without insecure = true the address is refused before a byte is sent."""
    with pytest.raises(ConfigError, match=r"address = '10\.0\.0\.7:50061' is not loopback .*; set insecure = true"):
        connect(at("10.0.0.7:50061"))
    connect(at("10.0.0.7:50061", insecure=True))
    assert [rpc.is_loopback(a) for a in ("localhost:1", "127.0.0.9:1", "[::1]:1", "unix:/x", "example.org:1", "0.0.0.0:1")] == [
        True, True, True, True, False, False]


async def test_a_server_beyond_this_machine_has_to_be_meant():
    """Plaintext on an address that others reach needs insecure; the refusal, before it listens, names the ways."""
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 is not loopback .*--tls-dir .*--insecure"):
        EnvironmentServer(Guess(), host="0.0.0.0")
    async with EnvironmentServer(Guess(), host="0.0.0.0", insecure=True) as server:
        assert (await describe(at(f"127.0.0.1:{server.address.rpartition(':')[2]}"))).tasks == 100


@pytest.mark.parametrize("options, logged", [
    ((), "reset raised: ValueError (withheld, see --log-content)"),
    (("--log-content",), "reset raised: ValueError('my secret')"),
])
async def test_a_log_file_quotes_user_code_only_when_asked(tmp_path, options, logged):
    """Without a terminal, what an exception says is withheld, and the line names the option of this command that shows it."""
    (tmp_path / "raising.py").write_text(
        "from slipstream.environment import Environment\n\n\nclass Raising(Environment):\n"
        "    def reset(self, task):\n        raise ValueError('my ' + 'secret')\n")
    async with (
        served("raising:Raising", tmp_path, *options, stderr=asyncio.subprocess.PIPE) as (process, line),
        connect(at(line.split()[-1])) as client,
    ):
        [failed] = await client.reset([EpisodeReset("e", Task(0, 0))])
        assert isinstance(failed, SlipstreamError) and "my secret" in failed.message
        said = json.loads(await asyncio.wait_for(process.stderr.readline(), 10))
        assert said["message"] == logged and ("my secret" in said["traceback"]) is bool(options)


async def test_a_restarted_server_is_waited_for_and_its_episodes_start_afresh():
    """While nothing listens a call waits, by name; a new server does not know old episodes: NOT_FOUND, and a new id works."""


    class Retries(SystemClock):
        def __init__(self) -> None:
            self.slept = asyncio.Event()

        async def sleep(self, seconds: float) -> None:
            self.slept.set()
            await asyncio.sleep(0.01)

    port, clock = free_port(), Retries()
    waits = Waits(clock)
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(EnvironmentServer(Guess(), port=port))
        client = await stack.enter_async_context(connect(at(first.address), waits, clock))
        await client.reset([EpisodeReset("a", Task(0, 0))])
        await first.__aexit__()
        step = asyncio.create_task(client.step([EpisodeStep("a", 1, Action("5"))]))
        await asyncio.wait_for(clock.slept.wait(), 10)
        assert waits.current and waits.current[0].startswith("environment far at 127.0.0.1")
        await stack.enter_async_context(EnvironmentServer(Guess(), port=port))
        [lost] = await asyncio.wait_for(step, 10)
        assert isinstance(lost, NotFound) and "start it afresh" in lost.message
        [again] = await client.reset([EpisodeReset("a2", Task(0, 0))])
        assert isinstance(again, Reset) and waits.current is None


async def test_idle_episodes_are_forgotten():
    """A worker that died never closes its episodes; after idle_s without a call they make room."""

    class Hand(SystemClock):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Hand()
    async with EnvironmentServer(Guess(), idle_s=100, clock=clock) as server, connect(at(server.address)) as client:
        await client.reset([EpisodeReset("old", Task(0, 0)), EpisodeReset("used", Task(0, 0))])
        clock.now = 90
        await client.step([EpisodeStep("used", 1, Action("x"))])
        clock.now = 150
        await client.reset([EpisodeReset("new", Task(0, 0))])
        results = await client.step([EpisodeStep("old", 1, Action("x")), EpisodeStep("used", 2, Action("x"))])
        assert isinstance(results[0], NotFound) and not isinstance(results[1], Exception)
        assert len(server.episodes) == 2


async def test_a_request_without_an_episode_name_is_refused_as_a_whole():
    """Two nameless episodes could not be told apart."""
    async with EnvironmentServer(Guess()) as server, rpc.channel(server.address) as channel:
        stub = EnvironmentServiceStub(channel)
        with pytest.raises(Exception, match=r"episodes\[0\]\.episode is empty"):
            await rpc.call(stub.Reset, pb.ResetRequest(episodes=[pb.EpisodeReset(task=sample_pb2.Task(index=1))]), 5)


async def test_a_hanging_call_does_not_hold_up_the_end_of_the_process(tmp_path):
    """User code that never returns is given up after step_timeout_s; the server still stops on one SIGTERM, exit code 0."""
    (tmp_path / "sticky.py").write_text(
        "import time\nfrom slipstream.environment import Environment\n\n\nclass Sticky(Environment):\n"
        "    def reset(self, task):\n        time.sleep(1000)\n")
    async with (
        served("sticky:Sticky", tmp_path) as (process, line),
        connect(at(line.split()[-1], step_timeout_s=0.2)) as client,
    ):
        [late] = await client.reset([EpisodeReset("e", Task(0, 0))])
        assert isinstance(late, SlipstreamError) and late.reason == "TIMEOUT"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


async def test_the_sdk_loads_nothing_heavy():
    """An environment's author needs neither torch nor transformers, nor what datasets and S3 need."""
    code = ("import sys, slipstream.environment, slipstream.environments.server, slipstream.environments.dataset\n"
            "print({'torch', 'transformers', 'pyarrow', 'aiobotocore'} & set(sys.modules))")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0].decode().strip() == "set()"
