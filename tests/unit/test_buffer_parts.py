"""The small parts of the buffer: transition tables, task cursor, folded calls, batch log, boundary checks, server checks."""

from __future__ import annotations

import asyncio
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from services.buffer import rows, transitions
from services.buffer.batch_log import BatchLog, build
from services.buffer.boundary import _plain, _thorough, checked_sample, checked_score
from services.buffer.changes import Changes
from services.buffer.cursor import TaskCursor, permute
from services.buffer.fold import Fold
from services.buffer.ledger import BatchedGroup, Composition, Lease, Member, Rules, Waiting
from services.buffer.sentences import batch_sentence
from services.buffer.wire import submitted
from slipstream import plain_body, sample, seeds
from slipstream.errors import InvalidInput, NotFound, SlipstreamError
from slipstream.objects import FileStore
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2

SAMPLE = {
    ("open", "leased"), ("leased", "leased"), ("leased", "partial"), ("leased", "unscored"), ("leased", "scored"),
    ("partial", "leased"), ("unscored", "scoring"), ("scoring", "scored"), ("scoring", "unscored"),
    ("open", "closed"), ("leased", "closed"), ("partial", "closed"), ("unscored", "closed"), ("scoring", "closed")}
GROUP = {
    ("open", "complete"), ("open", "short"), ("complete", "batched"), ("short", "batched"), ("complete", "evaluated"),
    ("short", "evaluated"), ("batched", "committed"), ("open", "dropped"), ("complete", "dropped"), ("short", "dropped"),
    ("batched", "dropped")}


@pytest.mark.parametrize("edges, table, check", [
    (SAMPLE, transitions.SAMPLE_EDGES, transitions.check_sample), (GROUP, transitions.GROUP_EDGES, transitions.check_group)])
def test_no_other_edges(edges, table, check) -> None:
    """Exactly the edges of the architecture; every other pair of states is refused."""
    for old, new in itertools.product(table, table):
        if (old, new) in edges:
            check(old, new)
        else:
            with pytest.raises(transitions.RefusedTransition):
                check(old, new)


def test_an_epoch_has_every_task_once_and_the_next_another_order() -> None:
    for size in (1, 2, 7, 64, 1000):
        assert sorted(permute(i, size, 5) for i in range(size)) == list(range(size))
    cursor = TaskCursor(3, {"a": 1.0}, {"a": 50})
    epochs = [[cursor.index("a", 50 * e + i) for i in range(50)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1] and epochs[0] != list(range(50))


def test_the_mix_follows_the_weights_and_the_counts_the_draws() -> None:
    """3 : 1 within noise; counts before a draw, computed from the mix alone, equal those of drawing one by one."""
    cursor = TaskCursor(3, {"a": 3.0, "b": 1.0}, {"a": 0, "b": 10})
    drawn = list(itertools.islice(cursor.proposals(0, {}), 1000))
    share = sum(name == "a" for name, _ in drawn) / 1000
    assert 0.70 < share < 0.80
    assert cursor.counts_before(1000) == {"a": round(share * 1000), "b": 1000 - round(share * 1000)}
    assert list(itertools.islice(cursor.proposals(400, cursor.counts_before(400)), 5)) == drawn[400:405]


async def test_calls_that_arrive_together_become_one() -> None:
    """The first call starts at once; those that come while it runs share the next. Everybody gets their own results."""
    seen, gate, started = [], asyncio.Event(), asyncio.Event()

    async def apply(items: list[int]) -> list[int]:
        seen.append(list(items))
        started.set()
        await gate.wait()
        return [-i for i in items]

    fold = Fold(apply, size=lambda item: 1)
    calls = [asyncio.create_task(fold([0, 10]))]
    await started.wait()
    calls += [asyncio.create_task(fold([n, n + 10])) for n in range(1, 4)]
    await asyncio.sleep(0)  # each call has queued its items
    calls[1].cancel()
    gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert seen == [[0, 10], [1, 11, 2, 12, 3, 13]]
    assert results[0] == [0, -10] and results[2:] == [[-2, -12], [-3, -13]]
    assert isinstance(results[1], asyncio.CancelledError)


async def test_much_is_on_its_way_while_the_call_before_is_executed() -> None:
    """Of at least `most_bytes`: a second call beside the first, no third; and what is little waits, to be folded."""
    gate, seen = asyncio.Event(), []

    async def apply(items: list[int]) -> list[int]:
        seen.append(list(items))
        await gate.wait()
        return [-item for item in items]

    async def call(*items: int) -> None:
        calls.append(asyncio.create_task(fold(items)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    fold, calls = Fold(apply, size=lambda item: item, most_bytes=10), []
    await call(10)
    await call(4, 1)
    await call(4)
    assert seen == [[10]]
    await call(3)
    assert seen == [[10], [4, 1, 4, 3]]
    await call(20)
    await call(1)
    await call(2)
    assert len(seen) == 2
    gate.set()
    assert await asyncio.gather(*calls) == [[-10], [-4, -1], [-4], [-3], [-20], [-1], [-2]]
    assert seen[2:] == [[20], [1, 2]]


async def test_a_poll_sees_a_change_that_comes_while_it_looks() -> None:
    changes, looks = Changes(slow_poll_s=60), []

    async def look() -> int:
        looks.append(1)
        if len(looks) == 1:
            changes.notify(["ready"])  # between the look and the wait
        return len(looks)

    assert await changes.poll("ready", 30, look, lambda n: n == 2) == 2


async def test_after_the_last_was_taken_nobody_looks_until_something_changes() -> None:
    """An answer that took the last of a queue saves the next caller's look; a change in between brings the look back."""
    changes, looks = Changes(slow_poll_s=60), []

    async def look() -> int:
        looks.append(1)
        return len(looks)

    def poll() -> Any:
        return changes.poll("unscored", 30, look, lambda n: n, last=lambda n: n == 1)

    assert await poll() == 1
    waiting = asyncio.create_task(poll())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert looks == [1]
    changes.notify(["unscored"])
    assert await waiting == 2
    assert await poll() == 3  # the second answer left something


async def test_who_does_not_wait_gets_the_answer_of_who_has_just_found_nothing() -> None:
    """A thousand workers that ask each second for leases that are not there cost one look, not a thousand."""
    changes, looks = Changes(slow_poll_s=60), []

    async def look() -> str:
        looks.append(1)
        return f"nothing, at look {len(looks)}"

    def poll(topic: str = "samples") -> Any:
        return changes.poll(topic, 0, look, lambda _: False)

    assert [await poll() for _ in range(3)] == ["nothing, at look 1"] * 3
    changes.notify(["samples"])
    assert await poll() == "nothing, at look 2"
    assert [await poll("ready") for _ in range(2)] == ["nothing, at look 3", "nothing, at look 4"]  # depends on who asks


def test_the_seeds_of_a_draw_are_those_of_its_samples() -> None:
    assert seeds.sample_seeds(7, 2**40 + 3, 5) == [seeds.sample_seed(7, 2**40 + 3, i) for i in range(5)]


def test_leases_travel_as_runs() -> None:
    """Neighbours that only their sample tells apart are one row; every list comes back as it was."""
    def back(packed: bytes) -> list[Lease]:
        runs = struct.iter_unpack("<QIIII", packed)
        return [Lease(d, first + n, attempt, epoch) for d, first, count, attempt, epoch in runs for n in range(count)]

    group = [Lease(401, i, 1) for i in range(8)]
    assert len(rows.leases(group)) == 24 and back(rows.leases(group)) == group
    for changed in (Lease(401, 4, 2), Lease(402, 4, 1), Lease(401, 4, 1, 2), Lease(401, 3, 1), Lease(401, 6, 1)):
        mixed = [*group[:4], changed, *group[5:]]
        assert back(rows.leases(mixed)) == mixed
    assert rows.leases([]) == b""


def composition(count: int = 5) -> Composition:
    groups = [
        BatchedGroup(d, "sort", d * 7, 2, 1, 0, [
            Member(i, b"%d-%d" % (d, i) * 400, sample.crc32c(b"%d-%d" % (d, i) * 400), b"", 3, 4, 9, 5) for i in range(2)])
        for d in range(count)]
    return Composition(12, 1, 99, groups, [(77, "lag")])


async def test_the_batch_log_gives_back_every_body(tmp_path: Path) -> None:
    """Written once; a reader without the writer's memory finds the same composition and bodies; other bytes are named."""
    store = FileStore(tmp_path)
    written = await BatchLog(store, "r", 1).write(composition())
    reader = BatchLog(store, "r", 1)
    assert await reader.header(12) == written
    bodies = [b async for message in reader.read(12, []) for b in message.bodies]
    assert [b.body for b in bodies] == [m.body for g in composition().groups for m in g.members]
    chosen = [written.groups[3].members[1].sample, written.groups[1].members[0].sample]
    picked = [b.body async for m in reader.read(12, chosen) for b in m.bodies]
    assert picked == [b"1-0" * 400, b"3-1" * 400]
    assert await reader.newest() == 12
    with pytest.raises(NotFound, match="lacks 1 of the 1"):
        [m async for m in reader.read(12, [sample_pb2.SampleId(index=9)])]
    path = tmp_path / "batches/00000012.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?")
    with pytest.raises(SlipstreamError, match="damaged"):
        [m async for m in BatchLog(store, "r", 1).read(12, [])]


async def test_the_batch_log_is_a_function_of_the_ledger() -> None:
    """Whoever writes it, however often, writes the same bytes; references point at the bodies."""
    batch, pieces = await build("r", 1, composition())
    assert await build("r", 1, composition()) == (batch, pieces)
    data = b"".join(bytes(p) for p in pieces)
    for group in batch.groups:
        for member in group.members:
            ref = member.body
            assert sample.crc32c(data[ref.offset:ref.offset + ref.size]) == ref.crc32c


def wire(logprobs: list[float], more: int = 0, **fields: Any) -> samples_pb2.SubmittedSample:
    """A sample of 8 + `more` tokens, the last ones generated: `more` ordinary ones and those with these logprobs."""
    size, values = 8 + more, [-0.5] * more + logprobs
    segment = sample.Segment(
        np.arange(size, dtype=np.int32), np.arange(size) >= size - len(values), np.asarray(values, np.float32),
        (sample.Span(4, 2, 1, len(values)),))
    body = sample.encode(sample.Sample([segment]))
    told: dict[str, Any] = {
        "body": body, "tokens": size, "generated_tokens": len(values), "oldest_step": 2, "newest_step": 2,
        "crc32c": sample.crc32c(body)}
    return samples_pb2.SubmittedSample(**(told | fields))


@pytest.mark.parametrize("more", [0, 300, 30_000])
def test_bad_samples_are_refused_with_a_reason(more: int) -> None:
    """Whatever their size: small bodies are parsed, large ones are looked through where they are."""
    good = checked_sample((one := wire([-1.0, -2.0], more)), one.body)
    assert (good.tokens, good.generated_tokens, list(good.steps)) == (8 + more, 2 + more, [(2, 1)])
    for bad, reason in [
            (wire([-1.0], more, crc32c=1), "CRC"), (wire([-1.0], more, tokens=9), "HEADER_MISMATCH"),
            (wire([-1.0], more, oldest_step=1), "HEADER_MISMATCH"), (wire([float("nan")], more), "NON_FINITE_LOGPROB"),
            (wire([float("-inf")], more), "NON_FINITE_LOGPROB"), (wire([0.5], more), "POSITIVE_LOGPROB"),
            (wire([]), "NO_GENERATED_TOKENS"),
            (wire([-1.0], more, score=sample_pb2.Score(scalar=float("nan"))), "NON_FINITE_SCORE")]:
        with pytest.raises(InvalidInput) as error:
            checked_sample(bad, bad.body)
        assert error.value.reason == reason
    assert checked_score(sample_pb2.Score()) != b""  # a score of 0 is a score


def test_a_body_is_read_at_its_ends_as_a_parse_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte that is not data changed, doubled or left out, and parts that come twice: never another answer, and never one
    for what a parse refuses. What is written in another way than ours is left to the parse."""
    whole = wire([-1.0, -2.0], 100).body
    runs = whole.index(b"\x12", len(whole) // 2 - 40)
    places = [*range(40), *range(runs - 4, runs + 30), *range(len(whole) - 30, len(whole))]
    others = (b"", b"\x00", b"\x01", b"\x02", b"\x7f", b"\x80", b"\xff")
    changed = [whole[:n] + new + whole[n + 1:] for n in places for new in (*others, 2 * whole[n:n + 1])]
    body, short = sample_pb2.SampleBody.FromString(whole), sample_pb2.Segment()
    short.tokens.CopyFrom(sample.tensor(np.arange(3, dtype=np.int32)))
    segment = body.segments[0].SerializeToString()
    merged = segment + short.SerializeToString()
    later, too_short = (
        b"\x0a" + bytes([size & 0x7F | 0x80, size >> 7]) + data
        for data, size in ((merged, len(merged)), (segment, len(segment) + 1)))
    assert _plain(whole) == (108, 102, [(2, 1)])
    bodies = [*changed, 2 * whole, whole + b"\x0a\x00", later, too_short, whole + b"\x10\x02"]
    read = {other: found for other in bodies if (found := _plain(other)) is not None}
    monkeypatch.setattr(plain_body, "read", lambda body: None)
    for other, found in read.items():
        assert found == _thorough(other), other
    assert len(read) >= 2  # one that a changed byte left as good as it was, one with something after its segment


def test_turns_that_do_not_cover_the_answer_are_refused() -> None:
    for more in (0, 30_000):
        body = sample_pb2.SampleBody.FromString(wire([-1.0, -2.0], more).body)
        body.segments[0].turns.add(turn=0, length=1 + more)
        one = wire([-1.0, -2.0], more, body=body.SerializeToString(), crc32c=sample.crc32c(body.SerializeToString()))
        with pytest.raises(InvalidInput) as error:
            checked_sample(one, one.body)
        assert error.value.reason == "TURNS"


def test_large_bodies_are_cut_out_of_a_request() -> None:
    """The same samples and bodies as a parse gives; what is no message is refused as one."""
    request = samples_pb2.SubmitSamplesRequest(
        worker="w", samples=[wire([-1.0], more, transcript=b"text") for more in (0, 30_000, 5)])
    data = request.SerializeToString()
    for (head, body), whole in zip(submitted(data).samples, request.samples, strict=True):
        assert body == whole.body and head.transcript == b"text"
        assert (head.crc32c, head.tokens, head.HasField("lease")) == (whole.crc32c, whole.tokens, False)
    for broken in (data[:-1], data[:100_000], data + b"\x0a", data + b"\xff" * 11, b"\x0b" + data):
        with pytest.raises(DecodeError):
            submitted(broken)


def test_a_wait_names_what_is_missing_and_who_has_it() -> None:
    facts = {"batch": 7, "unfinished": 3, "of": 64, "undrawn": 0, "draw": 401, "state": "leased", "worker": "rollout-1"}
    assert batch_sentence(Waiting("unfinished", facts)) == (
        "batch 7: 3 of 64 groups unfinished, oldest draw 401 leased by rollout-1")


def test_rules_come_from_the_run_file() -> None:
    from slipstream.config import parse

    run = parse({
        "run": {"name": "r"}, "model": {"path": "m"}, "environments": [{"name": "a", "entry": "m:C", "over_lag": "mask"}],
        "schedule": {"max_lag": 0}})
    rules = Rules.of(run)
    assert (rules.pinned, rules.over_lag, rules.lease_ms) == (True, {"a": "mask"}, 60_000)
