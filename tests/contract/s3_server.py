"""A moto S3 server in a thread, and an open store on a fresh bucket of it."""

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from moto.server import ThreadedMotoServer

from slipstream.s3 import S3Store, open_s3

_BUCKETS = itertools.count()


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint's URL. Credentials are in the environment meanwhile."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    server.stop()


@contextlib.asynccontextmanager
async def open_bucket(endpoint: str, prefix: str = "some/prefix") -> AsyncIterator[S3Store]:
    """A store whose bucket nobody else uses."""
    bucket = f"bucket-{next(_BUCKETS)}"
    async with open_s3(bucket, prefix, endpoint, "us-east-1") as store:
        await store._client.create_bucket(Bucket=bucket)
        yield store
