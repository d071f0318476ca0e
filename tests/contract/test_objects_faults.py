"""What the object store does when disk, process or network fail: nothing torn, nothing claimed twice, bounded retries."""

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest
from s3_faults import FaultProxy, fault_proxy, scripted
from s3_server import ministack_server, open_bucket, s3_server

from slipstream.errors import ConfigError, Conflict, Exhausted, Unavailable
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


@pytest.mark.parametrize("write", ["put", "put_if_absent", "replace"])
async def test_durable_is_first_the_content_then_the_name(tmp_path, monkeypatch, write):
    """The file is synced before it gets its name, and the folders that got a name after: power may fail between any two."""
    events = []
    real = {"fsync": os.fsync, "replace": os.replace, "link": os.link}

    def fsync(handle):
        events.append(f"sync {Path(f'/proc/self/fd/{handle}').resolve().relative_to(tmp_path)}")
        real["fsync"](handle)

    def named(how):
        def place(source, target):
            events.append(f"name {Path(target).relative_to(tmp_path)}")
            real[how](source, target)
        return place

    monkeypatch.setattr(os, "fsync", fsync)
    for how in ("replace", "link"):
        monkeypatch.setattr(os, how, named(how))
    arguments = ("a/b/object", b"x", *((None,) if write == "replace" else ()))
    await getattr(FileStore(tmp_path), write)(*arguments)
    assert events[0].startswith("sync a/b/.object.") and events[1] == "name a/b/object"
    assert sorted(events[2:]) == ["sync .", "sync a", "sync a/b"]


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


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as url:
        yield url


@pytest.fixture
async def faulty(endpoint):
    """A store whose next requests suffer what `proxy.plan` says; its pauses take no time."""
    async with fault_proxy(endpoint) as proxy, open_bucket(proxy.url) as store:
        proxy.requests.clear()
        yield store, proxy


async def test_a_busy_store_is_asked_again(faulty):
    """503 twice, a reset connection, then fine: four requests, no error."""
    store, proxy = faulty
    proxy.plan = scripted("busy", "busy", "reset")
    await store.put("object", b"x")
    assert proxy.requests["PUT"] == 4
    assert await store.get("object") == b"x"


@pytest.mark.parametrize("fault, says", [("busy", "SlowDown"), ("reset", "Connection"), ("halved", "Payload")])
async def test_a_store_that_stays_away_is_unavailable(faulty, fault, says):
    """Retries are bounded; the error names the store and what it said."""
    store, proxy = faulty
    await store.put("object", b"0123456789")
    proxy.plan = scripted(*[fault] * 50)
    with pytest.raises(Unavailable, match=says):
        await store.get("object")
    assert proxy.requests["GET"] == TRIES


async def test_a_lost_reply_does_not_lose_the_win(faulty):
    """The write arrived, the reply did not, the repetition is told 412: the store is asked whose bytes are there."""
    store, proxy = faulty
    proxy.plan = scripted("lost")
    assert await store.put_if_absent("pointer", b"mine") is True
    tag = (await store.get_tagged("pointer"))[1]
    proxy.plan = scripted("lost", "busy")
    new = await store.replace("pointer", b"mine too", tag)
    assert await store.get_tagged("pointer") == (b"mine too", new)
    assert proxy.injected["lost", "PUT"] == 2


async def test_a_lost_reply_does_not_claim_anothers_win(faulty):
    """The same 412, but other bytes are there: somebody else won."""
    store, proxy = faulty
    tag = await store.replace("pointer", b"theirs", None)
    proxy.plan = scripted("reset")
    assert await store.put_if_absent("pointer", b"mine") is False
    newer = await store.replace("pointer", b"theirs again", tag)
    proxy.plan = scripted("reset")
    with pytest.raises(Conflict):
        await store.replace("pointer", b"mine", tag)
    assert await store.get_tagged("pointer") == (b"theirs again", newer)


async def test_a_conditional_write_in_progress_is_tried_again(faulty):
    """S3's 409 ConditionalRequestConflict says neither yes nor no."""
    store, proxy = faulty
    proxy.plan = scripted("pending")
    assert await store.put_if_absent("pointer", b"mine") is True


async def test_a_reply_that_breaks_off_is_read_again(faulty):
    """Fewer bytes than announced never pass for the object."""
    store, proxy = faulty
    await store.put("object", b"0123456789")
    proxy.plan = scripted("halved", "slow")
    assert await store.get("object") == b"0123456789"
    assert proxy.requests["GET"] == 2


@pytest.fixture
def small_parts(monkeypatch):
    """What is above 5 MB goes up in parts: S3's smallest."""
    monkeypatch.setattr("slipstream.s3.PART_BYTES", 5 << 20)


async def test_a_large_upload_that_fails_leaves_nothing(faulty, small_parts):
    """A part that cannot be sent: Unavailable, no object, the upload is aborted."""
    store, proxy = faulty
    proxy.plan = lambda request: "busy" if "partNumber" in request.target else ""
    with pytest.raises(Unavailable):
        await store.put("large", b"x" * (6 << 20))
    proxy.plan = scripted()
    assert await store.list("") == []
    uploads = await store._client.list_multipart_uploads(Bucket=store._bucket)
    assert not uploads.get("Uploads")


@pytest.mark.parametrize("then", ["", "gone"])
async def test_the_lost_reply_of_a_large_upload(faulty, small_parts, then):
    """The upload was completed, the reply got lost, and the repetition is told 200, 412 or 404: the object says whose it is."""
    store, proxy = faulty
    mine, others = b"m" * (6 << 20), b"o" * (6 << 20)

    def completing(*faults):
        left = list(faults)
        return lambda request: left.pop(0) if left and request.method == "POST" and "uploadId" in request.target else ""

    proxy.plan = completing("lost", then)
    assert await store.put_if_absent("large", mine) is True
    proxy.plan = completing("lost", then)
    await store.put("large", others)
    assert proxy.injected["lost", "POST"] == 2
    assert await store.get("large") == others
    proxy.plan = completing("reset")
    assert await store.put_if_absent("large", mine) is False
    proxy.plan = completing("gone")
    with pytest.raises(Unavailable, match="large"):
        await store.put("large", mine)
    assert await store.get("large") == others


async def test_a_small_body_damaged_on_the_way_is_refused_and_sent_again(tmp_path):
    """Pointers and manifests travel with Content-MD5. A server that compares it answers BadDigest, and keeps what it had."""
    with ministack_server(tmp_path) as url:
        async with fault_proxy(url, seed=1) as proxy, open_bucket(proxy.url) as store:
            proxy.plan = scripted("damaged", "damaged")
            tag = await store.replace("pointer", b"one", None)
            proxy.plan = scripted("damaged")
            await store.replace("pointer", b"two", tag)
            assert await store.get("pointer") == b"two"
            assert proxy.injected["damaged", "PUT"] == 3


@pytest.mark.parametrize("ignored", [b"if-none-match", b"if-match"])
async def test_the_probe_names_a_store_that_ignores_conditions(endpoint, ignored):
    """Many look-alikes take If-None-Match and If-Match and heed neither. Two trainers would both win: refused at start."""
    class Deaf(FaultProxy):
        async def _ask(self, head: bytes, body: bytes) -> bytes:
            lines = (line for line in head.split(b"\r\n") if not line.lower().startswith(ignored))
            return await super()._ask(b"\r\n".join(lines), body)

    async with fault_proxy(endpoint, kind=Deaf) as proxy, open_bucket(proxy.url) as store:
        with pytest.raises(ConfigError, match="ignores conditional writes.*use a store that honours them"):
            await store.probe()


async def test_more_than_a_page_of_keys_is_listed_whole():
    """S3 answers a thousand keys at most; the pages are joined."""
    class Pages:
        """A client that has two."""

        async def list_objects_v2(self, ContinuationToken="", **_):
            first, last = (1000, 1500) if ContinuationToken else (0, 1000)
            return {
                "Contents": [{"Key": f"some/prefix/{n:04d}"} for n in range(first, last)],
                "IsTruncated": not ContinuationToken, "NextContinuationToken": "t"}

    assert await S3Store(Pages(), "bucket", "some/prefix").list("") == [f"{n:04d}" for n in range(1500)]
