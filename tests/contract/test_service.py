"""A service process from its command line to its exit code: real processes, real signals."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from slipstream import rpc, service, service_command
from slipstream.config import parse
from slipstream.errors import ConfigError
from slipstream.lifecycle import Lifecycle, SystemClock
from slipstream.protos.types.v1 import policy_pb2, status_pb2, status_pb2_grpc

pytestmark = pytest.mark.slow

# A service for tests; what it does after it serves is the argument of `start`.
PROGRAM = """
import asyncio, os, sys, time
from slipstream.errors import *
from slipstream.service import main
async def start(context):
    lifecycle = context.lifecycle
{body}
main({service!r}, start)
"""
SERVE = "    await context.serve([])"


def run_data(folder, **service_settings):
    return {
        "run": {"name": "demo", "folder": str(folder)}, "model": {"path": "/nowhere"}, "service": service_settings,
        "environments": [{"name": "sort", "entry": "module:Class"}]}


@pytest.fixture
def launch(tmp_path):
    """Starts a service whose `start` has the given body. Call it again for another; all are gone at the end."""
    processes = []

    async def start(body, *options, name="buffer", settings=None, environment=None):
        run_file = tmp_path / "run.json"
        run_file.write_text(json.dumps(run_data(tmp_path / "run", **(settings or {}))))
        code = PROGRAM.format(body=body, service=name)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, "--run-file", str(run_file), *options, stderr=asyncio.subprocess.PIPE,
            env=os.environ | (environment or {}))
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()


async def serving(process):
    """Wait until it serves; the log line with its addresses."""
    async for line in process.stderr:
        if (fields := json.loads(line))["message"] == "serving":
            return fields
    raise AssertionError("it never served")


async def ended(process):
    """Exit code and log lines to the end."""
    _, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, [json.loads(line) for line in err.splitlines()]


async def test_a_service_is_found_by_its_file_answers_and_drains(launch, tmp_path):
    """`services/<instance>.json` holds pid and addresses while it lives; SIGTERM drains it: exit code 0, the file is gone."""
    process = await launch(SERVE, "--instance", "buffer-7")
    await serving(process)
    path = tmp_path / "run" / "services" / "buffer-7.json"
    found = json.loads(path.read_text())
    assert (found["service"], found["instance"], found["pid"]) == ("buffer", "buffer-7", process.pid)
    async with rpc.channel(found["address"]) as channel:
        status = await rpc.call(status_pb2_grpc.StatusServiceStub(channel).GetStatus, status_pb2.GetStatusRequest(), 5)
    assert (status.run, status.service, status.instance, status.state) == ("demo", "buffer", "buffer-7", "serving")
    process.send_signal(signal.SIGTERM)
    code, lines = await ended(process)
    assert code == 0 and [line["message"] for line in lines] == ["stopping: SIGTERM", "stopped"]
    assert not path.exists()


async def test_a_second_signal_ends_it_at_once(launch):
    """Even when the process is deep in a computation that no handler interrupts; the exit status is the signal's, not 0."""
    process = await launch(SERVE + """
    async def hang():
        print("in stage 2", file=sys.stderr, flush=True)
        time.sleep(60)
    lifecycle.on_stop(2, hang)""")
    await serving(process)
    process.send_signal(signal.SIGINT)
    async for line in process.stderr:
        if line == b"in stage 2\n":
            break
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 5) == -signal.SIGINT


@pytest.mark.parametrize("body, code, message", [
    ("async def loop():\n        raise KeyError('lost')\n    lifecycle.spawn('loop', loop())", 1,
     "task loop failed: KeyError('lost')"),
    ("async def loop():\n        pass\n    lifecycle.spawn('loop', loop())", 1, "the endless task loop returned"),
    ("lifecycle.finish()", 0, "stopping: finished"),
    ("raise InvalidInput('model.path = /x is no directory')", 2, "model.path = /x is no directory"),
    ("raise RuntimeError('bug')", 1, "task start failed: RuntimeError('bug')"),
    ("raise Fenced('incarnation 3 runs')", 3, "incarnation 3 runs")])
async def test_the_exit_code_tells_how_it_ended(launch, body, code, message):
    """0 finished, 1 restart may help, 2 configuration, 3 fenced. Tracebacks are for bugs only."""
    got, lines = await ended(await launch(f"{SERVE}\n    {body}"))
    assert got == code
    (line,) = [line for line in lines if line["message"] == message]
    assert ("traceback" in line) == ("KeyError" in message or "RuntimeError" in message)


async def test_a_start_that_waits_can_be_stopped(launch):
    """A worker whose buffer never comes stops on SIGTERM, exit code 0, and does not wait for anything."""
    process = await launch("""
    print("waiting", file=sys.stderr, flush=True)
    with context.waits.on("the buffer"):
        await asyncio.Event().wait()""", "--buffer", "127.0.0.1:1", name="rollout")
    assert await process.stderr.readline() == b"waiting\n"
    process.send_signal(signal.SIGTERM)
    assert (await ended(process))[0] == 0


async def refusal(process):
    """The one error line of a process that refuses to start."""
    code, lines = await ended(process)
    (line,) = [line for line in lines if line["level"] == "error"]
    assert code == 2 and "traceback" not in line
    return line["message"]


@pytest.mark.parametrize("options, says", [
    (["--port", "PORT"], "port PORT on 127.0.0.1 is in use: stop the process that has it, or choose another with --port"),
    (["--metrics-port", "PORT"], "port PORT on 127.0.0.1 is in use: .* choose another with --metrics-port"),
    (["--run-file", "/no/run.toml"], "run file /no/run.toml does not exist"),
    (["--port", "70000"], "--port 70000 is not a port: choose 1 to 65535")])
async def test_a_bad_option_is_one_line(launch, options, says):
    """Exit code 2, one line with field, value and remedy, no traceback."""
    async with rpc.Server("127.0.0.1", 0, []) as taken:
        port = taken.address.rpartition(":")[2]
        process = await launch(SERVE, *(option.replace("PORT", port) for option in options))
        assert re.search(says.replace("PORT", port), await refusal(process))


async def test_a_missing_buffer_address_is_one_line(launch):
    """Every service but the buffer needs it."""
    assert "pass --buffer HOST:PORT or set service.buffer_address" in await refusal(await launch(SERVE, name="rollout"))


async def test_a_folder_that_cannot_be_written_is_one_line(launch, tmp_path):
    """With the path and what to change."""
    (tmp_path / "run").write_text("in the way")
    message = await refusal(await launch(SERVE))
    assert f"run folder {tmp_path / 'run'} cannot be written" in message and "set run.folder" in message


async def test_debug_shows_the_traceback(launch):
    """SLIPSTREAM_DEBUG=1, for those who want to know where a line comes from."""
    code, lines = await ended(await launch("    raise ConfigError('no')", environment={"SLIPSTREAM_DEBUG": "1"}))
    assert code == 2 and any(", in start\n" in line.get("traceback", "") for line in lines)


def arguments(tmp_path, **settings):
    return service_command.ServiceArguments(parse(run_data(tmp_path, **settings)), "buffer", "buffer-0", "")


async def test_status_shows_what_a_service_sets(tmp_path):
    """Figures (its own and its metrics), details, policy version and the current wait; state is starting, serving, draining."""
    lifecycle = Lifecycle(SystemClock())
    async with service.open_context(arguments(tmp_path), lifecycle, SystemClock()) as context:
        assert context.state == "starting"
        address = await context.serve([])
        context.figures["open_draws"] = 3
        context.details["leases"] = {"rollout-0": [1, 2.5, None, Path("/x")]}
        context.policy_version = policy_pb2.PolicyVersion(number=9, step=8)
        async with rpc.channel(address) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)
            with context.waits.on("batch 7: 3 of 64 groups unfinished"):
                status = await rpc.call(stub.GetStatus, status_pb2.GetStatusRequest(), 5)
            assert status.waiting_for == "batch 7: 3 of 64 groups unfinished" and rpc.seconds(status.waited) < 5
            assert status.figures["open_draws"] == 3 and status.figures["stalled"] == 0
            assert status.details["leases"]["rollout-0"] == [1, 2.5, None, "/x"]
            assert (status.policy_version.number, status.state) == (9, "serving")
            lifecycle.request_stop("test")
            status = await rpc.call(stub.GetStatus, status_pb2.GetStatusRequest(), 5)
            assert (status.state, status.waiting_for) == ("draining", "")
        assert await lifecycle.run() == 0


async def test_a_wait_that_lasts_too_long_is_a_stall(tmp_path, caplog):
    """Over service.stall_s: state `stalled`, a gauge, and one log line that names what is awaited; over when the wait is."""
    caplog.set_level("INFO", "slipstream")
    lifecycle = Lifecycle(SystemClock())
    async with service.open_context(arguments(tmp_path, stall_s=0.04), lifecycle, SystemClock()) as context:
        await context.serve([])
        lifecycle.spawn("wait metrics", context.watch_waits())
        with context.waits.on("batch 7: 3 of 64 groups unfinished"):
            await wait_until(lambda: "stalled: waiting for batch 7: 3 of 64" in caplog.text)
            assert context.state == "stalled"
            reader, writer = await asyncio.open_connection(*context.metrics_address.split(":"))
            writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = (await reader.read()).decode().partition("\r\n\r\n")[2]
            writer.close()
        await wait_until(lambda: "no longer stalled" in caplog.text)
        assert context.state == "serving" and caplog.text.count("stalled: waiting") == 1
        samples = {(s.name, s.labels.get("for_")): s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert samples["slipstream_stalled", None] == 1
        assert samples["slipstream_waiting_seconds", "batch #"] > 0.04
        lifecycle.finish()
        assert await lifecycle.run() == 0


def test_the_command_line(tmp_path):
    """Defaults come from the run file; a port out of range or a missing address is a ConfigError."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run_data(tmp_path, buffer_address="10.0.0.1:50051") | {"buffer": {"redis": "unix:///r.sock"}}))
    args = service_command.arguments("rollout", ["--run-file", str(path), "--instance", "rollout-3"])
    assert (args.instance, args.buffer, args.host, args.port, args.redis) == ("rollout-3", "10.0.0.1:50051", "127.0.0.1", 0, "")
    assert service_command.arguments("rollout", ["--run-file", str(path), "--buffer", "b:1"]).buffer == "b:1"
    args = service_command.arguments("buffer", ["--run-file", str(path)])
    assert (args.instance, args.buffer, args.redis) == ("buffer-0", "", "unix:///r.sock")
    with pytest.raises(ConfigError, match="--metrics-port -1 is not a port"):
        service_command.arguments("buffer", ["--run-file", str(path), "--metrics-port", "-1"])


def test_the_launch_environment():
    """What only works from the start of a process: malloc's thresholds and the threads of numeric libraries."""
    variables = service_command.launch_environment(2)
    assert (variables["MALLOC_MMAP_THRESHOLD_"], variables["MALLOC_TRIM_THRESHOLD_"]) == ("1073741824", "4294967296")
    assert variables["OMP_NUM_THREADS"] == "2" and "OMP_NUM_THREADS" not in service_command.launch_environment(0)


async def test_importing_it_loads_nothing_heavy():
    """No torch, no transformers, no aiobotocore, no numpy."""
    code = "import sys, slipstream.service, slipstream.manifest; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    modules = set((await process.communicate())[0].decode().split())
    assert not modules & {"torch", "transformers", "aiobotocore", "botocore", "numpy", "redis", "typer"}


async def wait_until(condition, timeout_s=10.0):
    """Give the loop turns until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.002)
