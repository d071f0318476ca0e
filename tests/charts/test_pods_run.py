"""A rendered container, run here: its command line, mounts and probe, with real certificates, until SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.charts.rendering import ROOT, main_container, pods, render
from tests.redis_server import VALKEY


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def health(port: int) -> int:
    """What the kubelet would hear: a plaintext health check. Raises grpc.RpcError."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1).status


@contextmanager
def valkey(folder: Path) -> Iterator[int]:
    """The container of the development StatefulSet, on Valkey here. Gives its port."""
    objects = render("buffer", "redis.secretName=", "redis.dev.enabled=true")
    container = main_container(next(pod for name, pod in pods(objects) if name.startswith("StatefulSet")))
    assert container["command"] == ["valkey-server"]
    port = free_port()
    words = [{"6379": str(port), "/data": str(folder)}.get(word, word) for word in container["args"]]
    process = subprocess.Popen([str(VALKEY.binary), *words], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Path]:
    """A root with what the chart mounts: run file, Redis URL, certificates, an empty work folder."""
    for folder in ("etc/slipstream/run", "etc/slipstream/redis", "var/lib/slipstream", "data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/slipstream/run/run.toml").write_text((ROOT / "examples/sort-digits/run.toml").read_text())
    certs = [sys.executable, "-m", "slipstream.cli", "certs", str(tmp_path / "certs"), "--role", "buffer"]
    subprocess.run(certs, check=True, capture_output=True)
    (tmp_path / "certs/buffer").rename(tmp_path / "etc/slipstream/tls")
    (tmp_path / "etc/slipstream/tls/tls.key").chmod(0o440)  # as the kubelet mounts it for a group
    with valkey(tmp_path / "data") as port:
        (tmp_path / "etc/slipstream/redis/url").write_text(f"redis://127.0.0.1:{port}/0")
        yield tmp_path


def test_the_buffer_pod_serves_is_probed_and_stops(mounts: Path) -> None:
    """The probe's port answers in plaintext while the service's own asks for a certificate; SIGTERM ends it in time, with 0."""
    pod = next(pod for name, pod in pods(render("buffer")) if name == "Deployment/buffer")
    container, work = main_container(pod), mounts / "var/lib/slipstream"
    probe, port, metrics = free_port(), free_port(), free_port()
    assert container["readinessProbe"]["grpc"] == {"port": 50052}
    ports = {"50051": str(port), "50052": str(probe), "9090": str(metrics)}
    words = [ports.get(word, word).replace("/etc/", f"{mounts}/etc/") for word in container["args"]]
    environment = {each["name"]: each.get("value", "") for each in container["env"]} | {
        "HOME": str(work), "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.buffer", *words], cwd=work, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        status, ends = 0, time.monotonic() + 60
        while status != health_pb2.HealthCheckResponse.SERVING and time.monotonic() < ends and process.poll() is None:
            try:
                status = health(probe)
            except grpc.RpcError:
                process.poll()
        assert status == health_pb2.HealthCheckResponse.SERVING, process.stdout and process.stdout.read()
        with pytest.raises(grpc.RpcError):
            health(port)
        # What the notes say to do: `kubectl exec` into the pod and ask the ledger, with the pod's own certificate.
        ask = [sys.executable, "-m", "slipstream.cli", "ledger", f"{mounts}/etc/slipstream/run/run.toml"]
        told = subprocess.run(ask, cwd=work, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert "asked the buffer" in told.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=pod["spec"]["terminationGracePeriodSeconds"]) == 0
        assert list(work.iterdir())  # the run folder, in the volume
    finally:
        process.kill()
        process.wait()
