"""Real S3 emulators, and an open store on a fresh bucket: moto in a thread, and ministack in a process as a second opinion."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiobotocore.session import get_session
from moto.server import ThreadedMotoServer

from slipstream.s3 import S3Store, open_s3

_BUCKETS = itertools.count()
_SESSION = get_session()


@contextlib.contextmanager
def client_settings() -> Iterator[None]:
    """Credentials: any will do. One botocore session for all stores: it reads megabytes of service descriptions."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setattr("slipstream.s3.get_session", lambda: _SESSION)
        yield


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A moto server's URL."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with client_settings():
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    server.stop()


@contextlib.contextmanager
def ministack_server(folder: Path) -> Iterator[str]:
    """A ministack server's URL. It is a process of its own, with its files in `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "LOG_LEVEL": "ERROR",
        "TMPDIR": str(folder), "HOME": str(folder)}
    server = subprocess.Popen([sys.executable, "-m", "ministack"], env=environment, cwd=folder)
    try:
        until = time.monotonic() + 30
        while not _answers(f"http://127.0.0.1:{port}/_ministack/health"):
            assert server.poll() is None and time.monotonic() < until, "ministack does not start"
            time.sleep(0.05)
        with client_settings():
            yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=10)


@contextlib.asynccontextmanager
async def open_bucket(endpoint: str, prefix: str = "some/prefix") -> AsyncIterator[S3Store]:
    """A store whose bucket nobody else uses, and whose pauses between tries take no time."""
    bucket = f"bucket-{os.getpid()}-{next(_BUCKETS)}"
    async with open_s3(bucket, prefix, endpoint, "us-east-1") as store:
        await store._client.create_bucket(Bucket=bucket)
        store._sleep = no_pause
        yield store


async def no_pause(seconds: float) -> None:
    """Between two tries; the tests have no time."""
    await asyncio.sleep(0)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False
