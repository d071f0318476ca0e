"""A service as a pod runs it: on every address, with certificates, fixed ports, and secrets from a mounted file."""

import json
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from security_world import World, attempt, methods
from test_security import free_port

from slipstream import rpc, service, service_command
from slipstream.auth_credentials import Credentials
from slipstream.auth_tokens import Claims, sign
from slipstream.cli.run_folder import RunFolder
from slipstream.cli.supervisor import Supervisor
from slipstream.config import parse
from slipstream.errors import ConfigError
from slipstream.lifecycle import Lifecycle, SystemClock

SECRET = b"a secret that was mounted from a file"


def run_file(folder: Path, **sections: Any) -> Path:
    """A run file as a ConfigMap holds it."""
    path = folder / "run.json"
    path.write_text(json.dumps({
        "run": {"name": "demo", "folder": str(folder / "run")}, "model": {"path": "/nowhere"},
        "environments": [{"name": "sort", "entry": "module:Class"}], **sections}))
    return path


async def test_a_service_with_every_option(tmp_path: Path):
    """Flags reach the server: certificates on one port, tokens on the second, health alone in plaintext on the third."""
    world = World(tmp_path / "certs")
    (tmp_path / "tokens").touch(0o600)
    (tmp_path / "tokens").write_bytes(SECRET)
    port, client_port, health_port = free_port(), free_port(), free_port()
    arguments = service_command.arguments("rollout", [
        "--run-file", str(run_file(tmp_path)), "--buffer", "buffer.example:1", "--host", "0.0.0.0", "--port", str(port),
        "--client-port", str(client_port), "--health-port", str(health_port), "--tls-dir", str(tmp_path / "certs"),
        "--secret-file", str(tmp_path / "tokens")])
    status = next(m for m in methods() if m.name == "GetStatus")
    lifecycle = Lifecycle(SystemClock())
    async with service.open_context(arguments, lifecycle, SystemClock()) as context:
        assert await context.serve([]) == f"0.0.0.0:{port}"
        world.address = f"127.0.0.1:{port}"
        assert isinstance(context.channel, grpc.aio.Channel)  # its own way to the buffer is encrypted, or this would raise
        async with world.channel(world.credentials("cli"), peer="rollout") as channel:
            assert await attempt(channel, status) == (code_pb2.OK, "")
        token = sign(Claims("me", "cli", int(time.time()) + 60), SECRET)
        outside = Credentials("cli", token=token, authority=tmp_path / "certs" / "cli" / "ca.crt")
        async with rpc.channel(f"127.0.0.1:{client_port}", credentials=outside, peer="rollout") as channel:
            assert await attempt(channel, status) == (code_pb2.OK, "")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        lifecycle.request_stop("the test is over")
        assert await lifecycle.run() == 0


@pytest.mark.parametrize("options, says", [
    (["--host", "0.0.0.0"], r"--host 0.0.0.0 is not loopback and plaintext is refused there: set security.tls_dir"),
    (["--secret-file", "/nowhere"], "security.secret_file = /nowhere does not exist: create it"),
    (["--tls-dir", "/nowhere"], "/nowhere/tls.crt does not exist: it takes tls.crt, tls.key, ca.crt"),
    (["--client-port", "70000"], "--client-port 70000 is not a port"),
    (["--client-port", "7000"], "--client-port 7000 needs certificates"),
])
async def test_options_that_cannot_be_used(tmp_path: Path, options: list[str], says: str):
    """One line that names the option and the remedy: the exit code is 2, so that nobody restarts it."""
    with pytest.raises(ConfigError, match=says):
        arguments = service_command.arguments(
            "reward", ["--run-file", str(run_file(tmp_path)), "--buffer", "127.0.0.1:1", *options])
        async with service.open_context(arguments, Lifecycle(SystemClock()), SystemClock()) as context:
            await context.serve([])


@pytest.mark.parametrize("address, host", [("127.0.0.1:5", None), ("10.1.2.3:5", "10.1.2.3"), ("[fd00::1]:5", "fd00::1")])
def test_workers_elsewhere_may_join_a_local_run(tmp_path: Path, address: str, host: str | None):
    """The supervisor's buffer listens where the run file says that it is."""
    run = parse(json.loads(run_file(tmp_path, service={"buffer_address": address}).read_text()))

    class Lock:
        fd = 0

    made = Supervisor(run, RunFolder(tmp_path), Lock(), environment={})  # pyright: ignore[reportArgumentType]
    argv = list(next(p.command.argv for p in made.processes if p.service == "buffer"))
    assert (argv[argv.index("--host") + 1] if "--host" in argv else None) == host
    assert argv[argv.index("--port") + 1] == "5"
