"""Workers serve versions to each other: the store is read about once however many they are, and nobody is believed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout import near, peers
from services.rollout.peer_memory import PeerMemory
from slipstream import tls_authority
from slipstream.auth_credentials import Credentials
from slipstream.errors import Exhausted, from_rpc_error
from slipstream.manifest import Held, RawTensor, read_manifest, write_version
from slipstream.objects import FileStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.range_calls import plain, request_of
from slipstream.ranges import Range, Span, checksum
from slipstream.tensors import range_of
from slipstream.tls import Certificates
from tests.peer_fleet import RUN, CountingStore, Faulty, Fleet, Reader, ask, contents
from tests.unit.test_version_patches import _weights as patched_weights

TENSORS, SIZE = 24, 4096
WEIGHTS = [RawTensor(f"layer{i:02d}", "F32", (SIZE // 4,), random.Random(i).randbytes(SIZE)) for i in range(TENSORS)]
WEIGHTS.append(RawTensor("empty", "F32", (0,), b""))
EXPECTED = contents(WEIGHTS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor a range. A machine with much to do is no silent peer."""
    monkeypatch.setattr(near, "PEER_PORTION", SIZE)
    monkeypatch.setattr(peers, "SILENCE_S", 20.0)
    monkeypatch.setattr(peers, "DEADLINE_S", 20.0)
    monkeypatch.setattr(peers, "LOST_MOST_S", 1e6)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "objects")


@pytest.fixture
async def fleet(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    async with Fleet(store) as fleet:
        fleet.known(monkeypatch)
        yield fleet


async def written(store: CountingStore) -> PolicyVersion:
    return await write_version(store, run=RUN, number=1, step=1, incarnation=1, tensors=WEIGHTS, files={})


async def names(store: CountingStore, version: PolicyVersion) -> list[str]:
    """Of the ranges of tensors."""
    manifest = await read_manifest(FileStore(store.url.removeprefix("file://")), version)  # uncounted
    return [plain(range_of([t])).name for t in manifest.tensors if t.size]


@pytest.mark.parametrize("workers", [1, 8, 32])
async def test_the_store_is_read_once_however_many_workers_read(fleet: Fleet, store: CountingStore, workers: int) -> None:
    """A version, and a patch of another, announced to all at the same instant: every range leaves the store once, the manifest
    included, and every worker has every byte."""
    version = await written(store)
    await fleet.add(workers)
    assert await fleet.read(version) == [EXPECTED] * workers
    assert len(store.reads) >= TENSORS and set(store.reads.values()) == {1}
    first = await write_version(store, run=RUN, number=2, step=2, incarnation=1, tensors=patched_weights(0), files={})
    second = await write_version(
        store, run=RUN, number=3, step=3, incarnation=1, tensors=patched_weights(1), files={},
        parent=Held(first, patched_weights(0), 2))
    await fleet.read(first)
    assert await fleet.read(second) == [contents(patched_weights(1))] * workers
    assert set(store.reads.values()) == {1}
    owners = {fleet.owner_of(name) for name in await names(store, version)}
    assert len(owners) >= min(workers, TENSORS) / 2  # and the work is spread


async def test_a_worker_that_comes_later_reads_nothing_from_the_store(fleet: Fleet, store: CountingStore) -> None:
    """It comes to own ranges that it never had: it gets them from their former owners' memory. The same goes for a worker that
    starts again with an empty memory."""
    version = await written(store)
    await fleet.add(3)
    await fleet.read(version)
    before = store.bytes
    later = (await fleet.add(1))[0]
    owned = [later.peers.owns(name) for name in await names(store, version)]
    assert any(owned)
    assert await later.read(version) == EXPECTED
    later.memory._held.clear()
    assert await later.read(version) == EXPECTED
    assert store.bytes == before


async def test_a_worker_without_peers_reads_as_before(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses that cannot be looked up cost a moment, once, and nothing else; former ones stay."""
    version = await written(store)
    monkeypatch.setattr(peers, "FIRST_LOOKUP_S", 0.05)
    reader = Reader(fleet, 1)
    assert await reader.read(version) == EXPECTED and reader.counted("peer") == {}
    await fleet.add(2)
    assert len(fleet.readers[0].peers.members) == 2

    async def fails(entry: str) -> list[str]:
        raise OSError("no such name")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(peers, "_addresses", fails)
        await fleet.readers[0].peers.look_up()
    assert len(fleet.readers[0].peers.members) == 2


# what goes wrong with a peer


async def test_an_owner_that_dies_in_the_middle_costs_its_ranges_once_more(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight workers read; after a few answers one is gone. What it owned is read by the next in the ranking, for all."""
    version = await written(store)
    await fleet.add(8)
    owners = [fleet.owner_of(name) for name in await names(store, version)]
    victim = max(fleet.readers, key=owners.count)
    answered, plain_read = 0, victim.source.through

    async def until_it_dies(wanted: Range) -> tuple[bytes, int | None]:
        nonlocal answered
        answered += 1
        if answered == 2:
            await victim.server.stop()
        return await plain_read(wanted)

    monkeypatch.setattr(victim.source, "through", until_it_dies)
    others = [r for r in fleet.readers if r is not victim]
    assert await asyncio.gather(*(r.read(version) for r in others)) == [EXPECTED] * 7
    owned = owners.count(victim) + 1  # and perhaps the manifest
    assert owned >= 3 and max(store.reads.values()) <= 2
    assert sum(n - 1 for n in store.reads.values()) <= owned
    assert sum(r.counted("peer").get("failed", 0) for r in others) >= 1


@pytest.mark.parametrize("fault, outcome", [
    ("flip", "damaged"), ("cut", "damaged"), ("grow", "damaged"), ("nothing", "damaged"), ("endless", "damaged"),
    ("break", "failed"), ("bug", "failed"), ("silent", "slow"), ("hang", "slow"), ("miss", "miss"), ("full", "full"),
    ("run", "miss")])
async def test_a_peer_that_fails_or_lies_is_passed_over(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch, fault: str, outcome: str
) -> None:
    """Every kind of failure is counted by its name and costs others at most one more read of a range; who lies, hangs or breaks
    is left alone for a while."""
    slow = outcome == "slow"
    if slow:
        monkeypatch.setattr(peers, "SILENCE_S", 0.3)
        monkeypatch.setattr(peers, "DEADLINE_S", 0.4)
    version = await written(store)
    bad = Faulty(store, fault)
    good = await fleet.add(3)
    await fleet.add(1, serve=lambda _: bad)
    assert await asyncio.gather(*(r.read(version) for r in good)) == [EXPECTED] * 3
    counted = [r.counted("peer").get(outcome, 0) for r in good]
    assert sum(counted) >= 1 and max(store.reads.values()) <= (3 if slow else 2)
    if fault not in ("miss", "full"):
        assert bad.asked <= 3 * 5  # the manifest, or the reads that were under way together


async def test_peers_that_all_hang_cost_a_bounded_time(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many peers are connected to and say nothing. Each would cost its silence; after LOST_MOST_S of that nobody is asked."""
    monkeypatch.setattr(peers, "SILENCE_S", 0.1)
    monkeypatch.setattr(peers, "LOST_MOST_S", 0.35)
    version = await written(store)
    reader = (await fleet.add(1))[0]
    await fleet.add(24, serve=lambda _: Faulty(store, "silent"))
    started = time.monotonic()
    assert await reader.read(version) == EXPECTED
    assert time.monotonic() - started < 0.2 + 0.35 + 0.2 + 4.0  # two of the manifest, the budget, those under way, the machine
    assert 4 <= reader.counted("peer")["slow"] <= 14


@pytest.mark.parametrize("pause_s", [0.6])
async def test_a_slow_store_is_no_failure_of_the_owner(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    """The owner says that it still reads, so others wait with it for longer than a silence, and do not go to the store, too."""
    monkeypatch.setattr(peers, "SILENCE_S", 0.3)
    monkeypatch.setattr(peers, "BEAT_S", 0.05)
    await store.put("versions/1/x", b"abc")
    store.pause_s = pause_s
    wanted = Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abc")),))
    await fleet.add(4)
    assert await asyncio.gather(*(r.source.read_range(wanted) for r in fleet.readers)) == [(b"abc", None)] * 4
    assert store.reads.total() == 1


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from([*Faulty.FAULTS, "good", "dead"]), min_size=1, max_size=5), st.integers(0, 2))
def test_whatever_peers_do_the_bytes_are_the_manifests(faults: list[str], good: int) -> None:
    """Any company of peers, each with a fault of its own, beside up to two more that are well."""

    async def go() -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
            store = CountingStore(Path(folder) / "objects")
            version = await written(store)
            for name in ("SILENCE_S", "DEADLINE_S"):
                patched.setattr(peers, name, 0.1)
            async with Fleet(store) as fleet:
                fleet.known(patched)
                readers = await fleet.add(1 + good)
                for fault in faults:
                    if fault == "good":
                        readers += await fleet.add(1)
                    else:
                        added, = await fleet.add(1, serve=lambda _, fault=fault: Faulty(store, fault))
                        if fault == "dead":
                            await added.server.stop()
                assert await asyncio.gather(*(r.read(version) for r in readers)) == [EXPECTED] * len(readers)

    asyncio.run(go())


# what a worker answers, and whom


async def refused(reader: Reader, wanted: Range, run: str = RUN, held: bool = False) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await ask(reader, request_of(wanted, run, held))
    told = from_rpc_error(error.value)
    return f"{error.value.code().name} {told.reason}"


async def test_a_worker_says_plainly_what_it_does_not_serve(fleet: Fleet, store: CountingStore) -> None:
    """Another run, what is not there, what may change, bytes without checksums; nothing at all once it stops. A range is served
    without the worker having loaded anything: who is new serves, too."""
    reader, = await fleet.add(1)
    await store.put("versions/1/x", b"abc")
    await store.put("checkpoints/latest", b"abc")
    good = Span(0, 3, checksum(b"abc"))
    wanted = Range("versions/1/x", 0, 3, (good,))
    assert await refused(reader, wanted, held=True) == "NOT_FOUND HELD"
    assert await ask(reader, request_of(wanted, RUN)) == b"abc"
    assert await ask(reader, request_of(wanted, RUN, held=True)) == b"abc"
    assert await refused(reader, wanted, run="other") == "NOT_FOUND RUN"
    assert await refused(reader, Range("versions/2/x", 0, 3, (good,))) == "NOT_FOUND OBJECT"
    assert await refused(reader, Range("checkpoints/latest", 0, 3, (good,))) == "INVALID_ARGUMENT KEY"
    for spans in ((), (Span(0, 2, checksum(b"ab")),), (Span(1, 2, checksum(b"bc")),), (Span(0, 3, None),)):
        assert await refused(reader, Range("versions/1/x", 0, 3, spans)) == "INVALID_ARGUMENT CHECKS"
    wrong = Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abd")),))
    assert await refused(reader, wrong) == "UNAVAILABLE DAMAGED"
    assert reader.memory.bytes == 3
    reader.stopping.set()
    assert await refused(reader, wanted) == "UNAVAILABLE DRAINING"
    assert reader.metrics.peer_reads.labels("hit")._value.get() == 1


async def test_a_worker_answers_so_many_at_once(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more than that is told to go on to the next; memory for others is bounded, too, and the oldest goes."""
    monkeypatch.setattr("services.rollout.peer_service.CALLS", 2)
    await store.put("versions/1/x", b"abcdefg")
    store.pause_s = 0.2
    reader, = await fleet.add(1, most_bytes=9)
    wanted = [Range("versions/1/x", i, 3, (Span(0, 3, checksum(b"abcdefg"[i : i + 3])),)) for i in range(5)]
    answers = await asyncio.gather(*(ask(reader, request_of(w, RUN)) for w in wanted[:3]), return_exceptions=True)
    assert sorted(a.code().name if isinstance(a, grpc.aio.AioRpcError) else "OK" for a in answers) == [
        "OK", "OK", "RESOURCE_EXHAUSTED"]
    store.pause_s = 0.0
    for each in wanted[3:]:
        await ask(reader, request_of(each, RUN))
    assert reader.memory.bytes == 9 and reader.memory.held(wanted[4].name) == b"efg"
    memory = PeerMemory(4)
    with pytest.raises(Exhausted, match="objects.near.peer_bytes"):
        memory.for_others("a", 5, lambda: asyncio.sleep(0, (b"", None)), True)


async def test_a_peer_that_leaves_the_list_ends_nobodys_read(
    fleet: Fleet, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up without an address closes the way there only after the last answer; else readers would be cancelled."""
    await store.put("versions/1/x", b"abc")
    wanted = Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abc")),))
    await fleet.add(2)
    owner = fleet.owner_of(wanted.name)
    reader, = [r for r in fleet.readers if r is not owner]
    store.pause_s = 0.3
    reading = asyncio.create_task(reader.source.read_range(wanted))
    while not store.reads:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    peer = reader.peers.asked(wanted.name)[0]
    monkeypatch.setattr(peers, "_addresses", lambda entry: asyncio.sleep(0, [reader.address]))
    await reader.peers.look_up()
    assert await reading == (b"abc", None) and reader.counted("peer") == {"hit": 1}
    assert peer._channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


async def test_workers_of_a_node_with_one_folder_do_not_wait_for_each_other(
    fleet: Fleet, store: CountingStore, tmp_path: Path
) -> None:
    """Who asks holds the folder's turn for the range while its owner, on the same node, reads it: the owner takes none."""
    version = await written(store)
    await fleet.add(4, cache=tmp_path / "cache")
    async with asyncio.timeout(10):
        assert await fleet.read(version) == [EXPECTED] * 4
    assert set(store.reads.values()) == {1}


async def test_own_ranges_are_read_first_and_the_rest_in_an_order_of_ones_own(fleet: Fleet, store: CountingStore) -> None:
    """Else all would ask the owner of the first range at once, then all the second's."""
    version = await written(store)
    await fleet.add(6)
    all_names, seconds = await names(store, version), set()
    for reader in fleet.readers:
        order = reader.peers.order(all_names)
        owned = [reader.peers.owns(all_names[i]) for i in order]
        assert sorted(order) == list(range(TENSORS)) and owned == sorted(owned, reverse=True)
        seconds.add(order[sum(owned)])
    assert len(seconds) >= 4


async def test_a_member_that_goes_moves_only_its_own_ranges(fleet: Fleet, store: CountingStore) -> None:
    """Rendezvous hashing: everybody else's owner stays."""
    ranges = await names(store, await written(store))
    await fleet.add(5)
    before = {name: fleet.owner_of(name) for name in ranges}
    gone = fleet.readers.pop()
    for reader in fleet.readers:
        await reader.peers.look_up()
    assert all(fleet.owner_of(name) is owner for name, owner in before.items() if owner is not gone)
    await gone.server.stop()
    await gone.source.close()


async def test_only_rollout_workers_of_the_run_are_served_and_within_their_quota(
    tmp_path: Path, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With certificates both ends prove that they are rollout workers; a quota of bytes holds between peers, too."""
    authority = tls_authority.create_authority()
    for role in ("rollout", "trainer"):
        tls_authority.issue(authority, tmp_path / role, role)
    of = {
        role: Credentials(role, RUN, certificates=Certificates(tmp_path, role), own_bytes_per_minute=600)
        for role in ("rollout", "trainer")}
    await store.put("versions/1/x", b"abc")
    wanted = Range("versions/1/x", 0, 3, (Span(0, 3, checksum(b"abc")),))
    request = request_of(wanted, RUN)
    async with Fleet(store, credentials=of["rollout"]) as fleet:
        fleet.known(monkeypatch)
        await fleet.add(2)
        assert await asyncio.gather(*(r.source.read_range(wanted) for r in fleet.readers)) == [(b"abc", None)] * 2
        assert store.reads.total() == 1
        with pytest.raises(grpc.aio.AioRpcError, match="is for rollout, not for role trainer"):
            await ask(fleet.readers[0], request, of["trainer"])
        with pytest.raises(grpc.aio.AioRpcError, match="has used its quota of 600 bytes"):
            for _ in range(20):
                assert await ask(fleet.readers[0], request, of["rollout"]) == b"abc"
