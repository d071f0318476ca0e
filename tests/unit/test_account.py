"""`slipstream ledger`: the account of every draw, of a live run and of an ended one, and what makes it fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from google.protobuf import json_format
from prometheus_client import CollectorRegistry

from services.buffer.account import keep
from services.buffer.archive import archive
from services.buffer.cursor import TaskCursor
from services.buffer.front import Front
from services.buffer.ledger import Holders, Lease, Ledger, Rules, Scored, Submit, Version
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.redis_ledger import RedisLedger, connect
from services.buffer.service import registrations
from slipstream import rpc
from slipstream.balance import complaints
from slipstream.cli.account import as_data, as_text, read
from slipstream.cli.run_folder import RunFolder
from slipstream.config import RunFile, parse
from slipstream.errors import NotFound
from slipstream.lifecycle import SystemClock
from slipstream.objects import FileStore
from slipstream.protos.buffer.v1 import ledger_pb2
from slipstream.telemetry import BufferMetrics
from tests.redis_server import RedisProcess

L = TypeVar("L", bound=Ledger)
TASKS = {"sort": 10}


def run_file(folder: Path, address: str = "") -> RunFile:
    """2 groups of 2 samples a batch."""
    return parse({
        "run": {"name": "acc", "folder": str(folder)}, "model": {"path": "m"}, "service": {"buffer_address": address},
        "environments": [{"name": "sort", "entry": "m:C"}],
        "schedule": {"groups_per_batch": 2, "group_size": 2, "max_lag": 1}})


@pytest.fixture
async def ledger(redis: RedisProcess, tmp_path: Path) -> AsyncIterator[RedisLedger]:
    client = connect(redis.url)
    yield await opened(RedisLedger(client, Rules.of(run_file(tmp_path))))
    await client.aclose()


async def opened(ledger: L) -> L:
    """With a trainer that has published step 0."""
    await ledger.open(TASKS)
    incarnation = (await ledger.take_incarnation(0, 0)).incarnation
    number = await ledger.reserve_version(incarnation, 0)
    await ledger.publish_version(Version(number, 0, incarnation, "versions/1", 0))
    return ledger


async def some_work(ledger: Ledger) -> None:
    """4 draws: one committed, one dropped since both samples failed, one half done, one leased."""
    leases = [g.lease for g in (await ledger.grant_samples("rollout-0", 6)).grants]
    more = [g.lease for g in (await ledger.grant_samples("rollout-1", 2)).grants]
    assert [lease.draw for lease in leases + more] == [0, 0, 1, 1, 2, 2, 3, 3]
    done = [leases[0], leases[1], leases[4], more[0], more[1]]
    await ledger.submit_samples([finished(lease) for lease in done])
    failed = [dataclasses.replace(finished(lease), body=b"", steps=(), failure="environment: gone") for lease in leases[2:4]]
    await ledger.submit_samples(failed)
    grants = await ledger.grant_scoring("reward-0", 5)
    await ledger.submit_scores([Scored(g.lease, b"s") for g in grants if g.lease.draw != 2])
    assert (await ledger.number_batch(1, 1)).numbered
    await ledger.commit(1, 1)


def finished(lease: Lease) -> Submit:
    return Submit(lease, b"body", 7, 2, 1, [(0, 1)], transcript=b"t")


async def asked(ledger: Ledger, folder: Path, dead: bool = True):
    """What `slipstream ledger` reads from a buffer that serves this ledger."""
    front, store = Front(ledger, BufferMetrics(CollectorRegistry())), FileStore(folder / "objects")
    cursor = TaskCursor(0, {"sort": 1.0}, TASKS)
    async with rpc.Server("127.0.0.1", 0, registrations(front, store, cursor), grace_s=0.1) as server:
        return await read(RunFolder(folder), run_file(folder, server.address), dead)


async def test_every_draw_and_sample_has_a_place(ledger: RedisLedger, tmp_path: Path) -> None:
    """The buffer's answer names the state of everything, who holds leases, why a group was dropped, and what is over."""
    await some_work(ledger)
    found = await asked(ledger, tmp_path)
    b = found.balance
    assert found.live and complaints(b) == []
    assert {k: v for k, v in b.groups.items() if v} == {"committed": 2, "dropped": 1, "open": 1}
    assert {k: v for k, v in b.samples.items() if v} == {"scored": 4, "closed": 2, "leased": 1, "scoring": 1}
    assert dict(b.dropped) == {"failed": 1} and b.draws == 4 and b.low_water_mark == 2
    assert dict(b.sample_leases) == {"rollout-0": 1} and dict(b.scoring_leases) == {"reward-0": 1}
    assert (b.numbered_batch, b.committed_batch, b.published_step, b.budget) == (1, 1, 0, 4) and b.bytes > 0
    assert [(row["draw"], row.get("index"), row["reason"]) for row in found.letters] == [
        (1, 0, "environment: gone"), (1, 1, "environment: gone"), (1, None, "failed")]
    text = "\n".join(as_text(found, complaints(b), dead=True))
    assert "samples: 1 rollout-0; scoring: 1 reward-0" in text and "draw 1 sample 1: environment: gone" in text
    assert "adds up     yes" in text and "all below 2 are over" in text


async def test_both_ledgers_give_the_same_account(ledger: RedisLedger, tmp_path: Path) -> None:
    """The model and Redis agree about holders and the low-water mark, before, between and after."""
    memory = await opened(MemoryLedger(ledger.rules, lambda: 1_000_000))

    def comparable(h: Holders) -> object:
        return h.low_water_mark, dict(h.sample_leases), dict(h.scoring_leases), h.balance.groups, h.balance.samples

    assert comparable(await memory.holders()) == comparable(await ledger.holders())
    for each in (memory, ledger):
        await some_work(each)
    assert comparable(await memory.holders()) == comparable(await ledger.holders())
    briefly = await ledger.holders(leases=False)  # as after every commit: nobody's leases are counted
    assert comparable(await memory.holders(leases=False)) == comparable(briefly)
    assert (briefly.low_water_mark, briefly.sample_leases, briefly.scoring_leases) == (2, {}, {})


async def test_a_thousand_calls_at_once_take_turns(ledger: RedisLedger) -> None:
    """A fleet whose calls coincide waits for a connection; it is not refused for want of one."""
    await some_work(ledger)
    calls = [(ledger.heartbeat_samples([Lease(0, 0, 1)]), ledger.balance()) for _ in range(500)]
    assert len(await asyncio.gather(*(call for pair in calls for call in pair))) == 1000


async def test_archives_never_overwrite_each_other(ledger: RedisLedger, tmp_path: Path) -> None:
    """A published version is a line, but no change of state: an archive at the same sequence keeps what was trimmed before."""
    await some_work(ledger)
    store, before = FileStore(tmp_path / "objects"), [line["id"] for line in await ledger.archive()]
    await archive(ledger, store)
    incarnation = (await ledger.balance()).meta["incarnation"]
    number = await ledger.reserve_version(incarnation, 3)
    await ledger.publish_version(Version(number, 3, incarnation, "versions/3", 0))
    assert await archive(ledger, store) == 1
    texts = [await store.get(key) for key in await store.list("ledger/")]
    kept = [json.loads(line)["id"] for text in texts for line in text.splitlines()]
    assert set(before) < set(kept) and len(kept) == len(before) + 1


async def test_an_ended_run_is_read_from_the_store(ledger: RedisLedger, tmp_path: Path) -> None:
    """At its end the buffer archives what is in its logs and leaves its balance: the same account without a buffer, each dead
    letter once, wherever it lies."""
    await some_work(ledger)
    live, front, store = await asked(ledger, tmp_path), Front(ledger, BufferMetrics(CollectorRegistry())), FileStore(
        tmp_path / "objects")
    torn = "".join(json.dumps(line) + "\n" for line in await ledger.archive())  # a buffer that died before it could trim
    await store.put("ledger/001-000000000001.jsonl", torn.encode())
    assert (await asked(ledger, tmp_path)).letters == live.letters
    assert await archive(ledger, store) > 0 and await archive(ledger, store) == 0
    assert [row["id"] for row in (await asked(ledger, tmp_path)).letters] == [row["id"] for row in live.letters]
    await keep(front, SystemClock(), store)
    ended = await read(RunFolder(tmp_path), run_file(tmp_path, "127.0.0.1:1"), dead=True)
    assert not ended.live and ended.letters == live.letters
    for balance in (ended.balance, live.balance):
        balance.ClearField("taken")
    assert ended.balance == live.balance
    data = as_data(ended, [], dead=True)
    assert data["source"] == "archive" and data["adds_up"] and data["groups"]["committed"] == 2 and data["draws"] == 4
    assert json.loads(json.dumps(data)) == data


async def test_a_run_without_a_ledger_says_so(tmp_path: Path) -> None:
    """Neither a buffer nor a balance in the store: an error, not an empty account that adds up."""
    with pytest.raises(NotFound, match="acc has no ledger yet: its buffer does not answer"):
        await read(RunFolder(tmp_path), run_file(tmp_path), dead=False)


@pytest.mark.parametrize(("change", "complaint"), [
    (lambda b: b.groups.update(open=0), "4 draws, but 3 groups: 2 committed, 1 dropped"),
    (lambda b: b.samples.update(scored=5), "4 draws of 2 samples, but 9 samples"),
    (lambda b: b.dropped.update(lag=1), "1 dropped groups, but 2 reasons: 1 failed, 1 lag"),
    (lambda b: b.sample_leases.update(ghost=1), "2 sample leases for 1 leased samples"),
    (lambda b: b.groups.update(open=0, committed=3), "80 bytes held for 0 groups that are not over"),
    (lambda b: b.groups.update(open=2, short=-1), "-1 short groups"),
])
def test_what_does_not_add_up(change: Callable[[ledger_pb2.Balance], None], complaint: str) -> None:
    """Each sum of the two state machines, and each queue beside them, is checked; a difference is named with its numbers."""
    good = {
        "draws": 4, "group_size": 2, "groups": {"committed": 2, "dropped": 1, "open": 1}, "bytes": 80,
        "samples": {"scored": 4, "closed": 2, "leased": 1, "unscored": 1}, "dropped": {"failed": 1},
        "sample_leases": {"rollout-0": 1}}
    balance = json_format.ParseDict(good, ledger_pb2.Balance())
    assert complaints(balance) == []
    change(balance)
    assert any(complaint in sentence for sentence in complaints(balance)), complaints(balance)
