"""The object store's contract, asked of every store: files, and S3 on good and bad days. It says what callers may rely on."""

import asyncio
import os
import zlib

import pytest
from s3_faults import fault_proxy, seeded
from s3_server import ministack_server, open_bucket, s3_server

from slipstream.errors import ConfigError, Conflict, InvalidInput, NotFound, OutOfRange
from slipstream.objects import FileStore, open_store, probe_conditions

STORES = ("file", "s3", pytest.param("faulty", marks=pytest.mark.slow), pytest.param("ministack", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as url:
        yield url


@pytest.fixture(scope="module")
def second_opinion(tmp_path_factory):
    with ministack_server(tmp_path_factory.mktemp("ministack")) as url:
        yield url


@pytest.fixture(params=STORES)
async def store(request, tmp_path):
    """Files; S3 as moto and as ministack understand it; and moto behind a network that fails three requests in ten."""
    if request.param == "file":
        async with open_store(f"file://{tmp_path}/objects") as store:
            yield store
    elif request.param == "faulty":
        seed = zlib.crc32(request.node.name.encode())
        async with fault_proxy(request.getfixturevalue("endpoint"), seed) as proxy, open_bucket(proxy.url) as store:
            proxy.plan = seeded(seed, 0.3)
            yield store
    else:
        server = {"s3": "endpoint", "ministack": "second_opinion"}[request.param]
        async with open_bucket(request.getfixturevalue(server)) as store:
            yield store


async def test_what_is_put_can_be_read_and_overwritten(store):
    """`put` overwrites; an empty object is an object."""
    await store.put("a/b.json", b"one")
    await store.put("a/b.json", b"two", durable=False)
    await store.put("a/empty", b"")
    assert await store.get("a/b.json") == b"two"
    assert await store.get("a/empty") == b""


async def test_several_buffers_are_written_one_after_the_other(store):
    """Large writes need not be joined first: any contiguous buffers, in order, empty ones too."""
    await store.put("joined", [b"head", bytearray(b"-"), memoryview(b""), memoryview(b"xtailx")[1:5]])
    assert await store.get("joined") == b"head-tail"


async def test_a_large_object_survives_the_trip(store, monkeypatch):
    """Above PART_BYTES S3 takes parts; the bytes are the same, and so is the condition."""
    monkeypatch.setattr("slipstream.s3.PART_BYTES", part := 5 << 20)
    data = os.urandom(1 << 20) * 6 + b"end"
    await store.put("large", [data[: 1 << 20], data[1 << 20 :]])
    assert await store.get("large") == data
    assert await store.get("large", part - 3, 6) == data[part - 3 : part + 3]
    assert await store.put_if_absent("large", data) is False
    assert await store.put_if_absent("large-2", data) is True


async def test_ranges_are_exact_or_an_error(store):
    """A range is given whole or refused; a short read never passes for the object's end."""
    await store.put("ten", b"0123456789")
    assert await store.get("ten", 3, 4) == b"3456"
    assert await store.get("ten", 7) == b"789"
    assert await store.get("ten", 3, 0) == b""
    for offset, size in [(8, 3), (10, 1), (99, None)]:
        with pytest.raises(OutOfRange):
            await store.get("ten", offset, size)
    with pytest.raises(InvalidInput, match="negative"):
        await store.get("ten", -1, 2)


async def test_a_missing_object_is_not_found(store):
    """Reading says NotFound, naming the key; deleting what is not there is fine."""
    for read in (store.get("no/such"), store.get("no/such", 1, 2), store.get("no/such", 0, 0), store.get_tagged("no/such")):
        with pytest.raises(NotFound, match="no/such"):
            await read
    await store.delete("no/such")


async def test_delete_removes_only_that_object(store):
    """Neighbours stay, and the key can be written again."""
    await store.put("d/one", b"1")
    await store.put("d/two", b"2")
    await store.delete("d/one")
    assert await store.list("") == ["d/two"]
    await store.delete("d/two")
    assert await store.list("") == []
    assert await store.put_if_absent("d/one", b"again")


async def test_one_of_sixteen_writers_wins(store):
    """`put_if_absent` of one key at once: one True, and the object is the winner's."""
    bodies = [b"writer %d " % i * 1000 for i in range(16)]
    won = await asyncio.gather(*(store.put_if_absent("pointer", body) for body in bodies))
    assert won.count(True) == 1
    assert await store.get("pointer") == bodies[won.index(True)]
    assert await store.put_if_absent("pointer", b"late") is False


async def test_replace_needs_the_current_tag(store):
    """`replace` gives a chain of tags; None stands for "does not exist"; a stale tag is a Conflict and changes nothing."""
    first = await store.replace("latest", b"1", None)
    with pytest.raises(Conflict):
        await store.replace("latest", b"again from nothing", None)
    assert (await store.get_tagged("latest")) == (b"1", first)
    second = await store.replace("latest", b"2", first)
    with pytest.raises(Conflict):
        await store.replace("latest", b"zombie", first)
    assert (await store.get_tagged("latest")) == (b"2", second)
    with pytest.raises(Conflict):
        await store.replace("never-written", b"x", second)


async def test_one_of_sixteen_replacements_wins(store):
    """With the same tag in hand only one writer gets through."""
    tag = await store.replace("latest", b"start", None)
    results = await asyncio.gather(
        *(store.replace("latest", b"writer %d" % i, tag) for i in range(16)), return_exceptions=True)
    winners = [i for i, r in enumerate(results) if isinstance(r, str)]
    assert len(winners) == 1
    assert all(isinstance(r, Conflict) for i, r in enumerate(results) if i not in winners)
    assert await store.get_tagged("latest") == (b"writer %d" % winners[0], results[winners[0]])


async def test_list_is_sorted_and_by_prefix_of_the_text(store):
    """A prefix may end within a name. Keys come back relative to the store's root."""
    for key in ("versions/00000002-1/m", "versions/00000010-1/m", "versions/00000001-1/m", "versionsX", "files/a"):
        await store.put(key, b"x", durable=False)
    assert await store.list("versions/") == ["versions/00000001-1/m", "versions/00000002-1/m", "versions/00000010-1/m"]
    assert await store.list("versions/0000001") == ["versions/00000010-1/m"]
    assert await store.list("version") == [*(await store.list("versions/")), "versionsX"]
    assert await store.list("nothing/") == []


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "", "a//b", "a/", ".hidden", "a/.tmp", "a\0b", "ü", "a b"])
async def test_a_key_cannot_leave_the_store(store, key):
    """Traversal, absolute and hidden names are refused by every method before anything is touched."""
    for attempt in (
        store.put(key, b"x"), store.put_if_absent(key, b"x"), store.replace(key, b"x", None),
        store.get(key), store.get_tagged(key), store.delete(key),
    ):
        with pytest.raises(InvalidInput):
            await attempt
    if key not in ("", "a/"):
        with pytest.raises(InvalidInput):
            await store.list(key)


async def test_probe_accepts_a_store_that_honours_conditions(store):
    """And leaves nothing behind."""
    await store.probe()
    assert await store.list("") == []


class IgnoresConditions(FileStore):
    """Like several S3 look-alikes: conditional headers are accepted and ignored."""

    async def put_if_absent(self, key, data):
        await self.put(key, data)
        return True


class IgnoresTags(FileStore):
    async def replace(self, key, data, tag):
        await self.put(key, data)
        return "tag"


@pytest.mark.parametrize("kind", [IgnoresConditions, IgnoresTags])
async def test_probe_refuses_a_store_that_ignores_conditions(tmp_path, kind):
    """Found at start, in one line that names the remedy, rather than by two trainers that both believe they won."""
    with pytest.raises(ConfigError, match="ignores conditional writes.*use a store that honours them"):
        await probe_conditions(kind(tmp_path))


async def test_probe_refuses_a_folder_that_cannot_be_written(tmp_path):
    """One line with the path."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be used.*"):
        await FileStore(tmp_path / "file" / "objects").probe()


async def test_a_folder_may_have_any_name(tmp_path):
    """A file URL is not percent-decoded: what is after file:// is the path."""
    async with open_store(f"file://{tmp_path}/100%25 #1?") as store:
        await store.put("object", b"x")
    assert (tmp_path / "100%25 #1?" / "object").read_bytes() == b"x"


@pytest.mark.parametrize("url, says", [
    ("gs://bucket", "not one of file, s3"), ("file://relative/path", "three slashes"), ("s3:///x", "the bucket is missing")])
async def test_a_url_that_names_no_store_is_refused(url, says):
    """The message shows how to write it."""
    with pytest.raises(ConfigError, match=says):
        async with open_store(url):
            pass
