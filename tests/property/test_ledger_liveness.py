"""A batch commits in bounded steps from any reachable state, once faults stop and one worker of each kind is alive.

Hypothesis writes the past: any program of `ledger_programs`, with crashes. Then everybody who worked in it is gone. One rollout
worker, one reward worker and one trainer, which starts from some checkpoint as after a crash, take turns on a clock that goes
on by a fifth of a lease a turn. A batch that did not exist before must be committed within `BOUND` turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.buffer.ledger import Grant, Lease, Numbering, Outcome, Partial, Rules, Scored, Submit, Version
from tests.property.ledger_programs import RULES, Step, play, programs, rebuilt_from_log
from tests.property.ledger_world import Pair, World
from tests.redis_server import RedisProcess

pytestmark = pytest.mark.slow

BOUND = 30
TURN_MS = 200
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


class RolloutWorker:
    """Leases what it can, works when it has loaded a version that is new enough, keeps its leases meanwhile."""

    def __init__(self) -> None:
        self.held: dict[Lease, Grant] = {}

    async def turn(self, world: World) -> None:
        versions = await world.call("versions")
        loaded: Version | None = versions[0] if versions else None
        if self.held:
            outcomes = await world.call("heartbeat_samples", list(self.held))
            self.held = {k: g for (k, g), o in zip(self.held.items(), outcomes, strict=True) if o is Outcome.ACCEPTED}
        granted = await world.call("grant_samples", "alive", 6, loaded.number if loaded else 0)
        self.held |= {g.lease: g for g in granted.grants}
        done = []
        for grant in self.held.values():
            pinned = next((v for v in versions if v.number == grant.pinned_version), None)
            version = pinned if grant.pinned_version else loaded
            if version and version.step >= grant.min_step:
                done.append(Submit(grant.lease, b"alive", 5, 5, 3, [(version.step, version.incarnation)], b"text"))
        if done:
            await world.call("submit_samples", done)
            for submit in done:
                del self.held[submit.lease]


async def score(world: World, same: bool) -> None:
    """One turn of the reward worker; `same`: no group has a signal."""
    grants = await world.call("grant_scoring", "alive", 50)
    await world.call("submit_scores", [Scored(g.lease, b"1", 0.5 if same else float(g.lease.sample)) for g in grants])


class Trainer:
    """The loop of services/trainer/loop.py, as the ledger sees it: numbers the next batch while it trains this one."""

    def __init__(self, publish_every: int, checkpoint_every: int) -> None:
        self.publish_every, self.checkpoint_every = publish_every, checkpoint_every
        self.incarnation = self.step = 0
        self.finished = False

    async def start(self, world: World, checkpoint: int) -> None:
        """Every start is a resume: incarnation, publish, commit again."""
        self.incarnation = (await world.call("take_incarnation", 0, checkpoint)).incarnation
        self.step = checkpoint
        await world.publish(self.incarnation, checkpoint)
        await world.call("commit", self.incarnation, checkpoint)

    async def turn(self, world: World) -> None:
        answer: Numbering = await world.call("number_batch", self.incarnation, self.step + 1)
        self.finished = answer.finished
        if answer.numbered:
            await world.call("read_batch", self.step + 1)  # out of range: in the log alone
            await world.call("number_batch", self.incarnation, self.step + 2)
            self.step += 1
            if self.step % self.publish_every == 0:
                await world.publish(self.incarnation, self.step)
        if answer.checkpoint_now or (answer.numbered and self.step % self.checkpoint_every == 0):
            await world.call("commit", self.incarnation, self.step)


async def turns_to_commit(world: World, trainer: Trainer, checkpoint: int, same: bool = False) -> int:
    """Turns until a batch that is not numbered yet is committed, or the run is over; AssertionError beyond BOUND."""
    goal, worker = min(world.state.get("numbered") + 1, world.rules.steps), RolloutWorker()
    await trainer.start(world, checkpoint)
    for turn in range(1, BOUND + 1):
        await worker.turn(world)
        await score(world, same)
        await trainer.turn(world)
        await world.call("sweep")
        world.now += TURN_MS
        if trainer.finished or world.state.get("committed") >= goal:
            return turn
    awaited = [await world.call(*call) for call in (
        ("number_batch", trainer.incarnation, trainer.step + 1), ("grant_samples", "x", 1))]
    raise AssertionError(f"no batch after {BOUND} turns: {awaited}; {dict(world.state.meta)}")


# Once a wedge: drawn while every step was published, the group of draw 4 asks for step 1; now every second step is.
OTHER_CADENCE = [("grant", 0, 5, ""), ("flow", 0, 1, ""), ("submit", 1, 3, ""), ("flow", 1, 1, ""), ("grant", 0, 1, "")]


@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@example(OTHER_CADENCE, "again", 0, False, 2, 1)
@given(program=programs("reply front redis"), rules=st.sampled_from(sorted(RULES)), past=st.integers(0, 9),
       same=st.booleans(), publish_every=st.integers(1, 3), checkpoint_every=st.sampled_from([1, 2, 5]))
def test_a_batch_commits_from_any_state(
        program: list[Step], rules: str, past: int, same: bool, publish_every: int, checkpoint_every: int) -> None:
    """See the module. `past`: how far the checkpoint is ahead of the last commit."""
    asyncio.run(_live(RULES[rules], program, past, same, publish_every, checkpoint_every))


@settings(max_examples=6, deadline=None, suppress_health_check=QUIET)
@given(program=programs("reply front", most=30), rules=st.sampled_from(sorted(RULES)), past=st.integers(0, 9))
def test_a_batch_commits_from_any_state_in_redis(server: RedisProcess, program: list[Step], rules: str, past: int) -> None:
    """The same on a real server, of which every step equals the model's."""
    asyncio.run(_live(RULES[rules], program, past, False, 1, 2, server))


async def _live(
        rules: Rules, program: list[Step], past: int, same: bool, publish_every: int, checkpoint_every: int,
        server: RedisProcess | None = None) -> None:
    every = 1 if rules.pinned else min(publish_every, rules.max_lag + 1)
    rules = dataclasses.replace(rules, publish_every=every)
    world = Pair(server, rules) if server else World(rules)
    try:
        await play(world, program)
        await turns_to_commit(world, Trainer(every, checkpoint_every), checkpoint_of(world, past), same)
    finally:
        await world.close()


def checkpoint_of(world: World, past: int) -> int:
    """A checkpoint that may exist, `past` batches after the last commit."""
    committed = world.state.get("committed")
    return max(committed, min(committed + past, world.committable()))


# --- named states, each the end of a real incident


async def _train(world: World, batches: int, body: bytes) -> None:
    """Number and publish these batches, committing nothing."""
    for batch in range(1, batches + 1):
        granted = await world.call("grant_samples", "gone", 99, 0)
        await world.call("submit_samples", [
            Submit(g.lease, body, g.lease.sample, 5, 3, [(g.min_step, 1)], b"", b"1", reward=g.lease.sample)
            for g in granted.grants])
        assert (await world.call("number_batch", 1, batch)).numbered
        await world.publish(1, batch)


async def full_quota(world: World) -> None:
    """Large bodies fill the quota while their batches are numbered, trained and not committed."""
    await _train(world, 2, b"x" * 100)
    await world.call("grant_samples", "gone", 99, 0)
    assert world.state.draw_refusal() == "bytes"


async def half_a_batch_fills_the_quota(world: World) -> None:
    """One group is complete and takes all bytes; nothing is unfinished or uncommitted that could free any."""
    granted = await world.call("grant_samples", "gone", 2, 0)
    await world.call("submit_samples", [
        Submit(g.lease, b"x" * 500, 1, 5, 3, [(0, 1)], b"", b"1", reward=g.lease.sample) for g in granted.grants])
    assert world.state.get("bytes") > world.rules.quota_bytes and len(world.state.ready) == 1


async def full_budget(world: World) -> None:
    """All draws that may be made are leased by workers that died."""
    await world.call("grant_samples", "gone", 99, 0)
    assert world.state.draw_refusal() in ("budget", "version")


async def dead_trainer(world: World) -> None:
    """It died with batches numbered, versions published and nothing committed."""
    await _train(world, 3, b"body")
    assert (world.state.get("numbered"), world.state.get("committed")) == (3, 0)


async def mass_expiry(world: World) -> None:
    """All leases lapse at once, again and again, until one more grant would be too many."""
    for _ in range(world.rules.max_attempts):
        await world.call("grant_samples", "gone", 99, 0)
        world.now += 10 * world.rules.lease_ms
    assert {s["a"] for g in world.state.groups.values() for s in g["s"]} == {world.rules.max_attempts}


async def unfinished_partials(world: World) -> None:
    """A drained worker has given everything back half done."""
    grants = (await world.call("grant_samples", "gone", 99, 0)).grants
    await world.call("submit_partials", [Partial(g.lease, b"half", [(0, 1)], release=True) for g in grants])
    assert not world.state.leases


async def scoring_lapsed(world: World) -> None:
    """A reward worker died with every sample."""
    grants = (await world.call("grant_samples", "gone", 99, 0)).grants
    await world.call("submit_samples", [Submit(g.lease, b"body", 1, 5, 3, [(0, 1)], b"text") for g in grants])
    await world.call("grant_scoring", "gone", 99)
    assert world.state.scoring and not world.state.unscored


async def fenced_worker(world: World) -> None:
    """A zombie hands in what was granted again to another, which died, too."""
    old = (await world.call("grant_samples", "zombie", 99, 0)).grants
    world.now += 5 * world.rules.lease_ms
    await world.call("grant_samples", "gone", 99, 0)
    late = [Submit(g.lease, b"body", 1, 5, 3, [(0, 1)], b"text") for g in old]
    assert set(await world.call("submit_samples", late)) == {Outcome.FENCED}


async def lost_incarnation(world: World) -> None:
    """Redis was emptied; batch log and checkpoint know better, and a trainer's start has rebuilt the ledger."""
    await dead_trainer(world)
    plan = rebuilt_from_log(world, world.state.get("numbered"), 2, 1)
    await world.empty()
    await world.call("sweep")
    await world.call("rebuild", plan)


STATES = [
    full_quota, half_a_batch_fills_the_quota, full_budget, dead_trainer, mass_expiry, unfinished_partials, scoring_lapsed,
    fenced_worker, lost_incarnation]


@pytest.mark.parametrize("schedule", ["full", "pinned"])
@pytest.mark.parametrize("past", STATES, ids=lambda f: f.__name__)
def test_a_batch_commits_after(server: RedisProcess, past: Any, schedule: str) -> None:
    """From each of the named states."""
    async def live() -> None:
        rules = RULES[schedule]
        world = Pair(server, dataclasses.replace(rules, quota_bytes=900) if "quota" in past.__name__ else rules)
        try:
            await world.begin()
            await past(world)
            await turns_to_commit(world, Trainer(1, 2), checkpoint_of(world, 0))
        finally:
            await world.close()
    asyncio.run(live())
