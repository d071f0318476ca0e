"""What a ledger promises to the trainer, one promise a test, on every implementation and server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.buffer import redis_ledger
from services.buffer.ledger import Outcome, Rebuilt, Submit, Version
from services.buffer.redis_ledger import RedisLedger
from slipstream.errors import Fenced, InvalidInput, NotFound, OutOfRange
from tests.contract.ledger_bench import Bench, batch_draws, draws, finish, grant, straggle, submit


async def test_batches_take_complete_groups_in_draw_order(bench: Bench) -> None:
    """Completion order does not matter; a slow group is passed by, and comes first in the next batch."""
    ledger = await bench.start()
    grants = await grant(ledger)
    by_draw = {d: [g for g in grants if g.lease.draw == d] for d in range(4)}
    for draw in (3, 2):
        await finish(ledger, by_draw[draw])
    await finish(ledger, by_draw[1])
    assert (await ledger.number_batch(1, 1)).numbered
    assert await batch_draws(ledger, 1) == [1, 2]
    await finish(ledger, by_draw[0])
    assert (await ledger.number_batch(1, 2)).numbered
    assert await batch_draws(ledger, 2) == [0, 3]
    again = await ledger.number_batch(1, 1)
    assert again.numbered and await batch_draws(ledger, 1) == [1, 2]


async def test_wait_keeps_a_group_that_would_become_too_old(bench: Bench) -> None:
    """Draw 0 runs since step 0 with max_lag 1: batch 2 is not numbered without it, although enough others are complete."""
    ledger = await bench.start()
    slow = await straggle(bench, ledger)
    waits = await ledger.number_batch(1, 2)
    assert not waits.numbered and waits.waiting is not None
    assert (waits.waiting.why, waits.waiting.facts["draw"], waits.waiting.facts["worker"]) == ("oldest", 0, "w")
    await finish(ledger, slow)
    assert (await ledger.number_batch(1, 2)).numbered
    assert await batch_draws(ledger, 2) == [0, 3]


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_drop_and_mask_do_not_wait(bench: Bench, policy: str) -> None:
    """`drop` skips the late group by name; `mask` trains it, with its old tokens as context only."""
    ledger = await bench.start(over_lag={"sort": policy})
    slow = await straggle(bench, ledger)
    assert (await ledger.number_batch(1, 2)).numbered
    assert await batch_draws(ledger, 2) == [3, 4]
    submits = [Submit(g.lease, b"body", 4, 5, 3, [(0, 1), (2, 1)], score=b"1") for g in slow]
    await bench.publish(ledger, 2)
    await ledger.submit_samples(submits)
    await finish(ledger, await grant(ledger), step=2)
    assert (await ledger.number_batch(1, 3)).numbered
    composition = await ledger.read_batch(3)
    if policy == "mask":
        assert [(g.draw, g.lag, g.mask_below_step) for g in composition.groups] == [(0, 2, 1), (5, 1, 0)]
    else:
        assert [(g.draw, g.lag) for g in composition.groups] == [(5, 1), (6, 0)]
        assert composition.drops == [(0, "lag")]
        assert (await ledger.balance()).dropped == {"lag": 1}


async def test_pinned_batches_are_ranges_of_draws(bench: Bench) -> None:
    """Batch k is draws [(k-1)B, kB) of step max(0, k-1-max_lag), drawn only once that step is published."""
    ledger = await bench.start(pinned=True)
    grants = await grant(ledger)
    assert draws(grants) == [0, 1, 2, 3]
    assert {g.pinned_version for g in grants} == {1}
    await finish(ledger, [g for g in grants if g.lease.draw > 0])
    waits = await ledger.number_batch(1, 1)
    assert waits.waiting is not None and waits.waiting.facts["unfinished"] == 1
    await finish(ledger, [g for g in grants if g.lease.draw == 0])
    assert (await ledger.number_batch(1, 1)).numbered
    assert await batch_draws(ledger, 1) == [0, 1]
    await bench.publish(ledger, 1)
    later = await grant(ledger)
    assert draws(later) == [4, 5]
    assert {(g.min_step, g.pinned_version) for g in later} == {(1, 2)}


async def test_bytes_bound_the_draws_and_ask_for_a_checkpoint(bench: Bench) -> None:
    """Room is reserved at the draw; a batch that lacks room asks for a commit, and a commit frees the bodies."""
    ledger = await bench.start(groups_per_batch=1, max_lag=1, quota_bytes=700)
    grants = await grant(ledger)
    await ledger.submit_samples([submit(g, transcript=b"", body=b"x" * 250, score=b"1") for g in grants if g.lease.draw == 0])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await ledger.submit_samples([submit(g, transcript=b"", body=b"x" * 250, score=b"1") for g in grants if g.lease.draw == 1])
    assert (await ledger.number_batch(1, 2)).numbered
    await bench.publish(ledger, 2)
    refused = await ledger.grant_samples("w", 1)
    assert refused.waiting is not None and refused.waiting.why == "bytes"
    assert (await ledger.number_batch(1, 3)).checkpoint_now
    assert await ledger.commit(1, 2) == 2
    assert (await ledger.balance()).meta["bytes"] == 0
    assert draws(await grant(ledger)) == [2, 3]


async def test_a_batch_that_is_committed_while_its_bodies_are_read_is_out_of_range(
        bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies come in portions, after the rows: one that has gone in between is never taken for an empty one."""
    ledger = await bench.start()
    if not isinstance(ledger, RedisLedger):
        return  # the model reads a batch at one moment
    await finish(ledger, await grant(ledger))
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    bodies = ledger._bodies

    async def committed(names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        await ledger.commit(1, 1)
        return await bodies(names, sizes)

    monkeypatch.setattr(redis_ledger, "BODIES_AT_ONCE", 5)
    assert [m.body for g in (await ledger.read_batch(1)).groups for m in g.members]
    monkeypatch.setattr(ledger, "_bodies", committed)
    with pytest.raises(OutOfRange):
        await ledger.read_batch(1)


async def test_a_restarted_trainer_gets_the_same_batches_and_fences_the_old_one(bench: Bench) -> None:
    """Numbered but uncommitted batches are served again unchanged; published_step falls back to the checkpoint."""
    ledger = await bench.start()
    await finish(ledger, await grant(ledger))
    for batch in (1, 2):
        assert (await ledger.number_batch(1, batch)).numbered
        await bench.publish(ledger, batch)
    before = await ledger.read_batch(2)
    taken = await ledger.take_incarnation(5, 1)
    assert (taken.incarnation, taken.numbered_batch, taken.committed_batch) == (6, 2, 1)
    assert (await ledger.balance()).meta["published"] == 1
    assert [v.step for v in await ledger.versions()] == [1]
    for call in (ledger.number_batch(1, 2), ledger.commit(1, 2), ledger.reserve_version(1, 2)):
        with pytest.raises(Fenced):
            await call
    assert (await ledger.number_batch(6, 2)).numbered
    assert await ledger.read_batch(2) == before
    with pytest.raises(OutOfRange):
        await ledger.number_batch(6, 1)
    with pytest.raises(Fenced, match="fork"):
        await ledger.take_incarnation(6, 0)


async def test_versions_stay_while_they_are_needed(bench: Bench) -> None:
    """Deletable are all but the newest two and those held; each is named in two answers, then forgotten."""
    ledger = await bench.start(max_lag=5)
    await finish(ledger, await grant(ledger))
    await ledger.hold_version(1, "reader", 10_000)
    named = [[v.number for v in (await bench.publish(ledger, step)).deletable] for step in (1, 2, 3)]
    assert named == [[], [], [2]]
    bench.now += 10_001
    assert [[v.number for v in (await bench.publish(ledger, step)).deletable] for step in (4, 5)] == [[1, 2, 3], [1, 3, 4]]
    assert [v.number for v in await ledger.versions()] == [6, 5]
    with pytest.raises(NotFound):
        await ledger.hold_version(1, "reader", 1000)
    with pytest.raises(InvalidInput, match="ReserveVersion"):
        await ledger.publish_version(Version(99, 6, 1, "k", 1))


async def test_a_publication_tells_what_may_be_loaded(bench: Bench) -> None:
    """Newest first, as `versions` would, and with it the number of the next version, when that is asked for."""
    ledger = await bench.start(max_lag=5)
    told = await bench.publish(ledger, 1)
    assert told.versions == await ledger.versions() and [v.step for v in told.versions] == [1, 0]
    assert not told.next_number
    again = await ledger.publish_version(told.versions[0], 2)
    assert again.versions == told.versions and again.next_number == told.versions[0].number + 1
    await ledger.publish_version(Version(again.next_number, 2, told.versions[0].incarnation, "k", 1))
    assert (await ledger.versions())[0].number == again.next_number


async def test_pinned_versions_are_not_deleted(bench: Bench) -> None:
    """Open draws name version 1, and so will the next ones: it stays, however many are newer."""
    ledger = await bench.start(pinned=True, max_lag=3, keep_versions=1)
    await grant(ledger, 1)
    named = [(await bench.publish(ledger, step)).deletable for step in (1, 2, 3)]
    assert named == [[], [], []]


async def test_committed_rows_leave_nothing_behind(bench: Bench) -> None:
    """The ledger stays flat: after many committed batches it holds what it held after the first."""
    ledger, sizes = await bench.start(), []
    for batch in range(1, 8):
        await finish(ledger, await grant(ledger), step=batch - 1)
        assert (await ledger.number_batch(1, batch)).numbered
        await bench.publish(ledger, batch)
        await ledger.commit(1, batch)
        await ledger.trim(await ledger.archive())
        (await ledger.balance()).check(2)
        sizes.append((await ledger.balance()).meta["bytes"])
    assert len(set(sizes[1:])) == 1
    assert await ledger.archive() == []


async def test_the_end_of_a_run_is_told(bench: Bench) -> None:
    ledger = await bench.start(steps=1)
    await finish(ledger, await grant(ledger))
    assert not (await ledger.grant_samples("w", 1)).finished
    assert (await ledger.number_batch(1, 1)).numbered
    assert (await ledger.grant_samples("w", 1)).finished
    assert (await ledger.number_batch(1, 2)).finished


async def test_a_rebuilt_ledger_goes_on_behind_the_log(bench: Bench) -> None:
    """A new epoch, logged batches as numbers, lost draws by name; leases of the former epoch are outdated, and it adds up."""
    ledger = await bench.start()
    old = await grant(ledger)
    seen = (await ledger.balance()).meta["epoch"]
    rebuilt = Rebuilt(seen, numbered=2, committed=1, next_draw=6, version=9, cursor={"sort": 6}, lost_draws=[4, 5])
    for _ in range(2):  # the second does nothing: another front was faster
        await ledger.rebuild(rebuilt)
    assert await ledger.submit_samples([submit(old[0])]) == [Outcome.OUTDATED]
    balance = await ledger.balance()
    assert (balance.dropped, balance.meta["epoch"]) == ({"ledger lost": 2}, seen + 1)
    balance.check(2)
    taken = await ledger.take_incarnation(3, 1)
    assert (taken.incarnation, taken.numbered_batch, taken.committed_batch) == (4, 2, 1)
    bench.incarnation = 4
    await bench.publish(ledger, 2)
    assert [v.number for v in await ledger.versions()] == [10]
    assert min(draws(await grant(ledger))) == 6
    assert await ledger.commit(4, 2) == 2
