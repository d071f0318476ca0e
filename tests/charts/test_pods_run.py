"""Rendered containers, run here as processes: their command lines, mounts and probes, with real certificates, until SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.charts.rendering import ROOT, SERVICES, Manifest, main_container, pods, render
from tests.ports import free_port
from tests.redis_server import VALKEY

PATIENCE_S = 90
ENTRY, ARGUMENTS = "slipstream.environments.sort_digits:SortDigits", "args = { shortest = 4, longest = 8 }"
# The demo, much smaller; its objects lie in the shared work folder, where a cluster has a bucket.
SMALL = {
    "steps = 250": "steps = 2", "groups_per_batch = 64": "groups_per_batch = 2", "group_size = 8": "group_size = 2",
    "steps = 70": "steps = 2", "rows = 64": "rows = 4", "checkpoint_every = 25": "checkpoint_every = 1",
    "target_reward = 0.8": "",
}


def healthy(port: int) -> bool:
    """What the kubelet would hear: a plaintext health check."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def wait_until(condition: Callable[[], object], processes: list[Container], what: str) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        for each in processes:
            assert each.process.poll() is None, f"{each.role} ended: {each.log.read_text()[-2000:]}"
        assert time.monotonic() < ends, f"no {what}: {[each.log.read_text()[-500:] for each in processes]}"
        time.sleep(0.05)


@dataclass
class Container:
    """A container as a process. `probe` and `port` are where it answers here."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path
    probe: int
    port: int


class Node:
    """A root with what the charts mount, and the containers on it. Kubernetes' names of ports and hosts become ours."""

    def __init__(self, root: Path) -> None:
        self.root, self.containers = root, []
        self.work, self.ports = root / "var/lib/slipstream", {role: free_port() for role in SERVICES}
        for folder in ("etc/slipstream/run", "etc/slipstream/redis", "var/lib/slipstream", "data"):
            (root / folder).mkdir(parents=True)
        run = (ROOT / "examples/sort-digits/run.toml").read_text()
        for large, small in SMALL.items():
            assert run.count(f"\n{large} ") == 1, large
            run = run.replace(f"\n{large} ", f"\n{small} ")
        run = run.replace(f'entry = "{ENTRY}"', f'address = "127.0.0.1:{self.ports["environment"]}"')
        run = run.replace(f"\n{ARGUMENTS} ", "\n")
        assert ENTRY not in run and ARGUMENTS not in run
        (root / "etc/slipstream/run/run.toml").write_text(run)
        subprocess.run(
            [sys.executable, "-m", "slipstream.cli", "certs", str(root / "certs")], check=True, capture_output=True)
        for key in (root / "certs").glob("*/tls.key"):
            key.chmod(0o440)  # as the kubelet mounts it for a group

    def start(self, role: str) -> Container:
        values = ("arguments.shortest=4", "arguments.longest=8") if role == "environment" else ()
        container = main_container(next(pod for name, pod in pods(render(role, *values)) if name.startswith("Deployment")))
        probe, port = free_port(), self.ports[role]
        assert container["readinessProbe"]["grpc"] == {"port": 50052}
        words: dict[str, str] = {
            "50051": str(port), "50052": str(probe), "9090": "0", "$(POD_NAME)": f"{role}-0",
            "buffer:50051": f"127.0.0.1:{self.ports['buffer']}", "/etc/slipstream/tls": str(self.root / "certs" / role)}
        command = [sys.executable, "-m", *(
            ["slipstream.cli", "env", "serve"] if role == "environment" else [f"services.{role}"])]
        assert container.get("command", command)[-1] == command[-1]
        given: list[str] = container["args"]
        arguments = [words.get(word, word).replace("/etc/", f"{self.root}/etc/") for word in given]
        log, env = self.root / f"{role}.log", self.environment(container)
        with log.open("wb") as output:
            process = subprocess.Popen([*command, *arguments], cwd=self.work, env=env, stdout=output, stderr=subprocess.STDOUT)
        self.containers.append(Container(role, process, log, probe, port))
        return self.containers[-1]

    def environment(self, container: Manifest) -> dict[str, str]:
        given = {each["name"]: each.get("value", "") for each in container["env"]}
        return given | {"HOME": str(self.work), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}

    @contextmanager
    def valkey(self) -> Iterator[None]:
        """The container of the development StatefulSet, on Valkey here; its URL is in the Secret."""
        objects = render("buffer", "redis.secretName=", "redis.dev.enabled=true")
        container = main_container(next(pod for name, pod in pods(objects) if name.startswith("StatefulSet")))
        assert container["command"] == ["valkey-server"]
        port = free_port()
        ours, given = {"6379": str(port), "/data": str(self.root / "data")}, list[str](container["args"])
        words = [ours.get(word, word) for word in given]
        process = subprocess.Popen([str(VALKEY.binary), *words], stdout=subprocess.DEVNULL)
        (self.root / "etc/slipstream/redis/url").write_text(f"redis://127.0.0.1:{port}/0")
        try:
            yield
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    with node.valkey():
        try:
            yield node
        finally:
            for each in node.containers:
                each.process.kill()
                each.process.wait()


def test_a_run_of_pods_finishes_and_its_trainer_stays(node: Node) -> None:
    """Five services with the charts' commands, mutual TLS between them, probed and stopped like pods.

    The trainer finishes its two steps and serves on with the model in its folder: what exits would be started again.
    """
    environment = node.start("environment")
    wait_until(lambda: healthy(environment.probe), [environment], "serving environment")
    buffer = node.start("buffer")
    wait_until(lambda: healthy(buffer.probe), [environment, buffer], "serving buffer")
    assert not healthy(buffer.port)  # the service's own port asks for a certificate
    workers = [node.start(role) for role in ("reward", "rollout", "trainer")]
    every, model = [environment, buffer, *workers], node.work / "runs/sort-digits/model/config.json"
    wait_until(model.exists, every, "finished model")
    wait_until(lambda: all(healthy(each.probe) for each in every), every, "healthy pods")
    # What the notes say to do: `kubectl exec` into the buffer's pod and ask the ledger, with the pod's own certificate.
    ask = [sys.executable, "-m", "slipstream.cli", "ledger", str(node.root / "etc/slipstream/run/run.toml")]
    told = subprocess.run(ask, cwd=node.work, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert "asked the buffer" in told and "2 of them trained" in told and "adds up     yes" in told
    for each in reversed(every):
        each.process.send_signal(signal.SIGTERM)
        assert each.process.wait(timeout=PATIENCE_S) == 0, each.log.read_text()[-2000:]
