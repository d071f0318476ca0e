"""What the object store does when disk, process or network fail: nothing torn, nothing claimed twice, bounded retries."""

import asyncio
import errno
import os
import sys

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from s3_server import open_bucket, s3_server

from slipstream.errors import Conflict, Exhausted, Unavailable
from slipstream.objects import FileStore
from slipstream.s3 import TRIES, S3Store

pytestmark = pytest.mark.slow

WRITER = """
import asyncio, sys
from slipstream.objects import FileStore
async def main():
    store = FileStore(sys.argv[1])
    for n in range(10**6):
        await store.put("object", bytes([n % 251]) * (4 << 20), durable=False)
        if n == 2:
            print("writing", flush=True)
asyncio.run(main())
"""


async def test_a_killed_writer_leaves_a_whole_object(tmp_path):
    """SIGKILL in the middle of overwriting 4 MB: a reader finds one whole version, and the leftovers are not objects."""
    for _ in range(3):
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITER, str(tmp_path), stdout=asyncio.subprocess.PIPE)
        assert writer.stdout is not None
        await writer.stdout.readline()
        writer.kill()
        await writer.wait()
        data = await FileStore(tmp_path).get("object")
        assert len(data) == 4 << 20 and data == data[:1] * len(data)
        assert await FileStore(tmp_path).list("") == ["object"]


async def test_a_reader_beside_a_writer_sees_whole_versions_only(tmp_path):
    """Reads while 2 MB objects are being replaced in a thread: always all of one."""
    store, size = FileStore(tmp_path), 2 << 20
    await store.put("object", b"0" * size)

    async def write():
        for n in range(1, 30):
            await store.put("object", b"%d" % (n % 10) * size, durable=False)

    writer, seen = asyncio.create_task(write()), set()
    while not writer.done():
        data = await store.get("object")
        assert data == data[:1] * size
        seen.add(data[:1])
    await writer
    assert len(seen) > 1


async def test_a_full_disk_is_said_and_leaves_the_old_object(tmp_path, monkeypatch):
    """ENOSPC is Exhausted, the object is the old one, no temp file stays."""
    store = FileStore(tmp_path)
    await store.put("object", b"old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exhausted, match="No space left"):
        await store.put("object", b"new")
    assert await store.get("object") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["object"]


class Faults:
    """A client that misbehaves: before or after really doing what was asked, one fault per call while there are any."""

    def __init__(self, client, *faults):
        self._client, self.faults, self.calls = client, list(faults), 0

    def __getattr__(self, name):
        real = getattr(self._client, name)

        async def method(**arguments):
            self.calls += 1
            when, error = self.faults.pop(0) if self.faults else ("never", None)
            if when == "before":
                raise error
            reply = await real(**arguments)
            if when == "after":
                raise error
            return error(reply) if when == "reply" else reply

        return method


def http(code, status):
    return ClientError({"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Put")  # pyright: ignore


SLOW, LOST = http("SlowDown", 503), EndpointConnectionError(endpoint_url="http://s3")


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as url:
        yield url


@pytest.fixture
async def faulty(endpoint):
    """A store whose next calls fail as told; its pauses take no time."""
    async def no_pause(seconds):
        await asyncio.sleep(0)

    async with open_bucket(endpoint) as store:
        client = Faults(store._client)
        yield S3Store(client, store._bucket, "some/prefix", sleep=no_pause), client


async def test_a_busy_store_is_asked_again(faulty):
    """503 twice, a refused connection, then fine: four requests, no error."""
    store, client = faulty
    client.faults = [("before", SLOW), ("before", SLOW), ("before", LOST)]
    await store.put("object", b"x")
    assert client.calls == 4
    assert await store.get("object") == b"x"


async def test_a_store_that_stays_away_is_unavailable(faulty):
    """Retries are bounded; the error names the store and what it said."""
    store, client = faulty
    client.faults = [("before", SLOW)] * 50
    with pytest.raises(Unavailable, match="SlowDown"):
        await store.get("object")
    assert client.calls == TRIES


async def test_a_lost_reply_does_not_lose_the_win(faulty):
    """The write arrived, the reply did not, the retry is told 412: the store is asked whose bytes are there."""
    store, client = faulty
    client.faults = [("after", LOST)]
    assert await store.put_if_absent("pointer", b"mine") is True
    tag = (await store.get_tagged("pointer"))[1]
    client.faults = [("after", LOST)]
    new = await store.replace("pointer", b"mine too", tag)
    assert await store.get_tagged("pointer") == (b"mine too", new)


async def test_a_lost_reply_does_not_claim_anothers_win(faulty):
    """The same 412, but other bytes are there: somebody else won."""
    store, client = faulty
    tag = await store.replace("pointer", b"theirs", None)
    client.faults = [("before", LOST)]
    assert await store.put_if_absent("pointer", b"mine") is False
    newer = await store.replace("pointer", b"theirs again", tag)
    client.faults = [("before", LOST)]
    with pytest.raises(Conflict):
        await store.replace("pointer", b"mine", tag)
    assert await store.get_tagged("pointer") == (b"theirs again", newer)


async def test_a_conditional_write_in_progress_is_tried_again(faulty):
    """S3's 409 ConditionalRequestConflict says neither yes nor no."""
    store, client = faulty
    client.faults = [("before", http("ConditionalRequestConflict", 409))]
    assert await store.put_if_absent("pointer", b"mine") is True


async def test_a_reply_that_breaks_off_is_read_again(faulty):
    """Fewer bytes than announced never pass for the object."""
    store, client = faulty
    await store.put("object", b"0123456789")

    def longer(reply):
        return {**reply, "ContentLength": reply["ContentLength"] + 5}

    client.faults = [("reply", longer)]
    assert await store.get("object") == b"0123456789"


async def test_a_large_upload_that_fails_leaves_nothing(faulty):
    """A part that cannot be sent: Unavailable, no object, the upload is aborted."""
    store, client = faulty
    client.faults = [("never", None), *([("before", SLOW)] * (2 * TRIES))]
    with pytest.raises(Unavailable):
        await store.put("large", b"x" * (20 << 20))
    client.faults = []
    assert await store.list("") == []
    uploads = await client.list_multipart_uploads(Bucket=store._bucket)
    assert not uploads.get("Uploads")


async def test_more_than_a_page_of_keys_is_listed_whole(faulty):
    """S3 answers a thousand keys at most; the pages are joined."""
    store, client = faulty
    pages = [
        {"Contents": [{"Key": f"some/prefix/{n:04d}"} for n in range(1000)], "IsTruncated": True, "NextContinuationToken": "t"},
        {"Contents": [{"Key": f"some/prefix/{n:04d}"} for n in range(1000, 1500)], "IsTruncated": False},
    ]
    client.faults = [("reply", lambda reply, page=page: page) for page in pages]
    assert await store.list("") == [f"{n:04d}" for n in range(1500)]
    assert client.calls == 2
