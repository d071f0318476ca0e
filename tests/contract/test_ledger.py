"""What a ledger promises, one promise a test, on the in-memory model and on a real Redis."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.buffer.ledger import Grant, Ledger, Outcome, Partial, Rules, Scored, Submit, Version
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream.errors import ConfigError, Fenced, InvalidInput, NotFound, OutOfRange
from tests.redis_server import RedisProcess, redis_process

RULES = Rules(
    run="contract", seed=3, steps=50, groups_per_batch=2, group_size=2, max_lag=1, pinned=False, lease_ms=1000,
    scoring_lease_ms=1000, max_attempts=3, group_timeout_ms=0, quota_bytes=1 << 20, sample_bytes=100, keep_versions=2,
    over_lag={"sort": "wait"}, weights={"sort": 1.0})


class Bench:
    """A ledger under a hand-driven clock, with a trainer that has taken its incarnation."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.url, self.now, self.incarnation = kind, url, 1_000_000, 0
        self.model: MemoryLedger | None = None
        self.clients: list[Any] = []

    async def open(self, **changes: Any) -> Ledger:
        """The ledger under rules with these changes; opening again joins the same contents."""
        rules = dataclasses.replace(RULES, **changes)
        if self.kind == "memory":
            ledger = MemoryLedger(rules, lambda: self.now)
            if self.model:
                ledger.state.meta = self.model.state.meta
            self.model = ledger
        else:
            self.clients.append(connect(self.url))
            ledger = RedisLedger(self.clients[-1], rules, lambda: self.now)
        await ledger.open({"sort": 0})
        self.now += 2000  # past the grace of the start
        return ledger

    async def start(self, **changes: Any) -> Ledger:
        """Open, take incarnation 1, publish step 0."""
        ledger = await self.open(**changes)
        self.incarnation = (await ledger.take_incarnation(0, 0)).incarnation
        await self.publish(ledger, 0)
        return ledger

    async def publish(self, ledger: Ledger, step: int) -> list[Version]:
        number = await ledger.reserve_version(self.incarnation, step)
        return await ledger.publish_version(Version(number, step, self.incarnation, f"versions/{number}", 7))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_process(Path(tmp_path_factory.mktemp("contract"))) as process:
        yield process


@pytest.fixture(params=["memory", "redis"])
async def bench(request: pytest.FixtureRequest, server: RedisProcess) -> AsyncIterator[Bench]:
    bench = Bench(request.param, server.url)
    client = connect(server.url)
    await client.flushall()
    yield bench
    for each in [client, *bench.clients]:
        await each.aclose()


async def grant(ledger: Ledger, count: int = 100, worker: str = "w") -> Sequence[Grant]:
    return (await ledger.grant_samples(worker, count)).grants


def submit(grant: Grant, step: int = 0, incarnation: int = 1, body: bytes = b"body", **fields: Any) -> Submit:
    parts: dict[str, Any] = {"transcript": b"text"} | fields
    return Submit(grant.lease, body, sum(body), 5, 3, [(step, incarnation)], **parts)


async def finish(ledger: Ledger, grants: Sequence[Grant], step: int = 0, incarnation: int = 1) -> None:
    """Submit with a score from the environment."""
    outcomes = await ledger.submit_samples([submit(g, step, incarnation, transcript=b"", score=b"1") for g in grants])
    assert set(outcomes) <= {Outcome.ACCEPTED}


def draws(grants: Sequence[Grant]) -> list[int]:
    return sorted({g.lease.draw for g in grants})


async def batch_draws(ledger: Ledger, batch: int) -> list[int]:
    return [g.draw for g in (await ledger.read_batch(batch)).groups]


async def test_draws_stop_at_the_budget_and_go_on_with_published_steps(bench: Bench) -> None:
    """At most (max_lag + 1) * B draws are outstanding; a numbered batch frees nothing, its published step does."""
    ledger = await bench.start()
    first = await grant(ledger)
    assert draws(first) == [0, 1, 2, 3]
    assert [g.min_step for g in first] == [0] * 8
    more = await ledger.grant_samples("w", 1)
    assert more.waiting is not None and more.waiting.why == "budget"
    await finish(ledger, first[:4])
    assert (await ledger.number_batch(1, 1)).numbered
    assert not await grant(ledger)
    await bench.publish(ledger, 1)
    second = await grant(ledger)
    assert draws(second) == [4, 5]
    assert [g.min_step for g in second] == [1] * 4  # draw 4 is for batch 3, whose tokens may be of step 1


async def test_nothing_is_drawn_before_the_first_version(bench: Bench) -> None:
    ledger = await bench.open()
    granted = await ledger.grant_samples("w", 1)
    assert granted.waiting is not None and granted.waiting.why == "first_version"


async def test_expiry_voids_nothing_until_somebody_else_is_granted(bench: Bench) -> None:
    """A slow worker still submits after its lease lapsed; once granted again, the older attempt is fenced."""
    ledger = await bench.start()
    slow, other = (await grant(ledger, 2, "slow"))
    bench.now += 1500
    assert await ledger.submit_samples([submit(slow)]) == [Outcome.ACCEPTED]
    again, = [g for g in await grant(ledger, 1, "fast") if g.lease.sample == other.lease.sample]
    assert again.lease == other.lease._replace(attempt=2)
    assert await ledger.submit_samples([submit(other)]) == [Outcome.FENCED]
    assert await ledger.heartbeat_samples([other.lease, again.lease]) == [Outcome.FENCED, Outcome.ACCEPTED]
    assert await ledger.submit_samples([submit(again)]) == [Outcome.ACCEPTED]


async def test_heartbeats_keep_and_release_gives_back(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0)
    grants = await grant(ledger)
    bench.now += 900
    assert await ledger.heartbeat_samples([grants[0].lease]) == [Outcome.ACCEPTED]
    bench.now += 900
    assert [g.lease.sample for g in await grant(ledger)] == [1]  # sample 0 was kept alive
    await ledger.release_samples([grants[0].lease])
    assert [g.lease for g in await grant(ledger)] == [grants[0].lease._replace(attempt=2)]


async def test_one_body_per_sample(bench: Bench) -> None:
    """The same attempt with the same checksum is fine again; another body is a conflict; nothing is stored twice."""
    ledger = await bench.start()
    one, = await grant(ledger, 1)
    assert await ledger.submit_samples([submit(one), submit(one)]) == [Outcome.ACCEPTED] * 2
    assert await ledger.submit_samples([submit(one, body=b"other")]) == [Outcome.CONFLICT]
    never = dataclasses.replace(one, lease=one.lease._replace(attempt=2))
    beyond = dataclasses.replace(one, lease=one.lease._replace(draw=99))
    assert await ledger.submit_samples([submit(never), submit(beyond)]) == [Outcome.UNKNOWN] * 2
    assert (await ledger.balance()).meta["bytes"] == len(b"body") + len(b"text")


async def test_a_partial_is_handed_to_the_next_attempt(bench: Bench) -> None:
    """What an attempt gave back unfinished comes with the next grant."""
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    one, = await grant(ledger)
    assert await ledger.submit_partials([Partial(one.lease, b"half", [(0, 1)], release=True)]) == [Outcome.ACCEPTED]
    again, = await grant(ledger)
    assert (again.partial, again.lease.attempt) == (b"half", 2)
    await finish(ledger, [again])
    assert (await ledger.balance()).meta["reserved"] == 0


async def test_scoring_has_its_own_leases(bench: Bench) -> None:
    """Unscored samples are granted in order of arrival, again after expiry; an older attempt's score is refused."""
    ledger = await bench.start()
    grants = await grant(ledger, 4)
    await ledger.submit_samples([submit(g, transcript=b"%d" % n) for n, g in enumerate(grants)])
    first = await ledger.grant_scoring("r", 3)
    assert [s.transcript for s in first] == [b"0", b"1", b"2"]
    bench.now += 1500
    again = await ledger.grant_scoring("r", 9)
    assert sorted(s.transcript for s in again) == [b"0", b"1", b"2", b"3"]
    assert await ledger.submit_scores([Scored(first[0].lease, b"1")]) == [Outcome.FENCED]
    assert await ledger.submit_scores([Scored(s.lease, b"1") for s in again]) == [Outcome.ACCEPTED] * 4
    assert await ledger.submit_scores([Scored(s.lease, b"1") for s in again]) == [Outcome.ACCEPTED] * 4
    assert (await ledger.balance()).groups["complete"] == 2


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


async def straggle(bench: Bench, ledger: Ledger) -> list[Grant]:
    """Batch 1 is draws 1 and 2, and is trained; draw 0 has its leases (returned) since step 0; all others are complete."""
    grants = await grant(ledger)
    await finish(ledger, [g for g in grants if g.lease.draw in (1, 2)])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await finish(ledger, [g for g in grants if g.lease.draw == 3])
    await finish(ledger, await grant(ledger), step=1)
    return [g for g in grants if g.lease.draw == 0]


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


async def test_failed_samples_make_a_group_short_or_drop_it(bench: Bench) -> None:
    """An environment's failure closes the sample; a group without any scored sample is dropped(failed) and drawn anew."""
    ledger = await bench.start(groups_per_batch=1, max_lag=0)
    a, b = await grant(ledger)
    await ledger.submit_samples([submit(a, failure="reset: 500")])
    await finish(ledger, [b])
    assert (await ledger.balance()).groups["short"] == 1
    assert (await ledger.number_batch(1, 1)).numbered
    assert [len(g.members) for g in (await ledger.read_batch(1)).groups] == [1]
    await bench.publish(ledger, 1)
    await ledger.submit_samples([submit(g, failure="reset: 500") for g in await grant(ledger)])
    balance = await ledger.balance()
    assert balance.dropped == {"failed": 1}
    balance.check(2)
    assert draws(await grant(ledger)) == [2]
    assert await ledger.submit_samples([submit(a, 1)]) == [Outcome.OUTDATED]
    assert [line["reason"] for line in await ledger.archive() if line["log"] == "dead"] == ["reset: 500"] * 3 + ["failed"]


async def test_too_many_attempts_close_a_sample(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    for attempt in (1, 2, 3):
        assert [g.lease.attempt for g in await grant(ledger)] == [attempt]
        bench.now += 1500
    assert draws(await grant(ledger)) == [1]
    assert (await ledger.balance()).dropped == {"failed": 1}


async def test_a_group_over_its_deadline_is_dropped_by_name(bench: Bench) -> None:
    ledger = await bench.start(group_timeout_ms=5000)
    grants = await grant(ledger)
    bench.now += 5001
    await ledger.sweep()
    assert (await ledger.balance()).dropped == {"timeout": 4}
    assert await ledger.submit_samples([submit(grants[0])]) == [Outcome.OUTDATED]
    assert draws(await grant(ledger)) == [4, 5, 6, 7]


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
    named = [[v.number for v in await bench.publish(ledger, step)] for step in (1, 2, 3)]
    assert named == [[], [], [2]]
    bench.now += 10_001
    assert [[v.number for v in await bench.publish(ledger, step)] for step in (4, 5)] == [[1, 2, 3], [1, 3, 4]]
    assert [v.number for v in await ledger.versions()] == [6, 5]
    with pytest.raises(NotFound):
        await ledger.hold_version(1, "reader", 1000)
    with pytest.raises(InvalidInput, match="ReserveVersion"):
        await ledger.publish_version(Version(99, 6, 1, "k", 1))


async def test_pinned_versions_are_not_deleted(bench: Bench) -> None:
    """Open draws name version 1, and so will the next ones: it stays, however many are newer."""
    ledger = await bench.start(pinned=True, max_lag=3, keep_versions=1)
    await grant(ledger, 1)
    named = [await bench.publish(ledger, step) for step in (1, 2, 3)]
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


async def test_a_run_keeps_its_shape(bench: Bench) -> None:
    """Another batch size would renumber all draws: refused at start, naming the field."""
    await bench.start()
    with pytest.raises(ConfigError, match="groups_per_batch"):
        await bench.open(groups_per_batch=3)


async def test_no_lease_expires_for_one_period_after_an_outage(bench: Bench) -> None:
    ledger = await bench.start(groups_per_batch=1, max_lag=0, group_size=1)
    one, = await grant(ledger)
    bench.now += 5000
    await ledger.grace()
    assert not await grant(ledger)
    assert await ledger.heartbeat_samples([one.lease]) == [Outcome.ACCEPTED]
