"""Random programs: every operation of the ledger, in any order, with crashes between any two.

A program is a list of (operation, pick, amount, fault). `pick` chooses among known leases and variants, `amount` is a count or
a time. A fault is `reply`: the operation happens, its reply is lost with the front, and it is asked for again at the next
front; `front`: a front dies before it; `redis`: the server is killed and started on its append-only file.
"""

from __future__ import annotations

import dataclasses
import random

from hypothesis import strategies as st

from services.buffer.cursor import TaskCursor
from services.buffer.ledger import Lease, Outcome, Partial, Rebuilt, Rules, Scored, Submit, Version
from tests.property.ledger_world import TASKS, World

FREE = Rules(
    run="model", seed=7, steps=9, groups_per_batch=2, group_size=2, max_lag=1, pinned=False, lease_ms=1000,
    scoring_lease_ms=700, max_attempts=3, group_timeout_ms=0, quota_bytes=2500, sample_bytes=60, keep_versions=2,
    over_lag={"a": "wait", "b": "mask", "c": "drop"}, weights={"a": 2.0, "b": 1.0, "c": 1.0}, edges=True)
RULES = {
    "free": FREE,
    "deadlines": dataclasses.replace(FREE, group_timeout_ms=9000, sample_timeout_ms=6000),
    "again": dataclasses.replace(FREE, max_requeues=1, resample_no_signal=1, group_timeout_ms=9000, max_attempts=2),
    "full": dataclasses.replace(FREE, quota_bytes=500, sample_timeout_ms=7000, max_requeues=2),
    "lag": dataclasses.replace(FREE, max_lag=2, groups_per_batch=1),
    "pinned": dataclasses.replace(FREE, pinned=True),
    "strict": dataclasses.replace(FREE, pinned=True, max_lag=0)}
WEIGHTS = {
    "flow": 9, "grant": 3, "submit": 3, "grant_scoring": 2, "score": 3, "number": 3, "publish": 3, "time": 2,
    "heartbeat_samples": 1, "release_samples": 1, "partial": 2, "heartbeat_scoring": 1, "commit": 1, "incarnation": 1,
    "hold": 1, "grace": 1, "rebuild": 1, "emptied": 1, "archive": 1, "stranger": 1}
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
Step = tuple[str, int, int, str]


def fixed_program(seed: int, length: int) -> list[Step]:
    """A long program of its own, the same at every run."""
    chance = random.Random(seed)
    return [(chance.choice(OPERATIONS), chance.randrange(401), chance.randrange(1, 9), "") for _ in range(length)]


def programs(faults: str = "", most: int = 50) -> st.SearchStrategy[list[Step]]:
    """Programs with these kinds of faults (words), each at one step in ten."""
    fault = st.sampled_from(["", *faults.split()]) if faults else st.just("")
    fault = st.integers(0, 9).flatmap(lambda n: fault if n == 9 else st.just(""))
    step = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 400), st.integers(1, 8), fault)
    return st.lists(step, min_size=most // 3, max_size=most)


async def play(world: World, program: list[Step]) -> None:
    """Begin, then every step."""
    await world.begin()
    for op, pick, amount, fault in program:
        if fault == "front":
            await world.restart_front()
        elif fault == "redis":
            await world.restart_redis()
        before = world.leases[:], world.scoring[:]
        await act(world, op, pick, amount)
        if fault == "reply":
            world.leases, world.scoring = before
            await world.restart_front()
            await act(world, op, pick, amount)


async def act(world: World, op: str, pick: int, amount: int) -> None:
    """One operation."""
    newest = world.incarnations[-1] if pick % 11 else world.incarnations[0]
    if op in ("heartbeat_samples", "release_samples"):
        await world.call(op, [_older(lease, pick) for lease in _some(world.leases, pick, amount)])
    elif op == "heartbeat_scoring":
        await world.call(op, [_older(lease, pick) for lease in _some(world.scoring, pick, amount)])
    elif op == "grant":
        granted = await world.call("grant_samples", f"w{pick % 2}", amount, pick % 4)
        world.leases += [g.lease for g in granted.grants]
    elif op == "grant_scoring":
        world.scoring += [g.lease for g in await world.call("grant_scoring", "r0", amount)]
    elif op == "number":
        batch = world.state.get("numbered") + 1 - pick % 2
        if (await _numbered(world, newest, batch)) and pick % 3 == 0:
            await world.call("read_batch", batch)
    elif op in ("submit", "partial", "score", "stranger"):
        await _hand_in(world, op, newest, pick, amount)
    elif op in ("publish", "hold", "commit", "incarnation", "rebuild", "emptied"):
        await _trainer(world, op, newest, pick, amount)
    elif op == "flow":
        await flow(world, pick, amount)
    elif op == "time":
        world.now += amount * 150 if pick % 6 else amount * 1500
        await world.call("sweep")
    elif op == "archive":
        await world.call("holders")
        await world.archive(pick)
    elif pick % 3 == 0:
        await world.call("grace")


def _some(leases: list[Lease], pick: int, amount: int) -> list[Lease]:
    return [leases[(pick + n) % len(leases)] for n in range(min(amount, len(leases)))] if leases else []


def _older(lease: Lease, pick: int) -> Lease:
    return lease._replace(attempt=lease.attempt + (-1 if pick % 5 == 0 else 1 if pick % 31 == 0 else 0))


async def _hand_in(world: World, op: str, newest: int, pick: int, amount: int) -> None:
    """Samples, partials and scores, of any lease that was ever granted, or was never."""
    step = world.step
    steps = sorted({(max(0, step - pick % 3), newest), (max(0, step - pick % 2), newest)})
    leases = [_older(lease, pick) for lease in _some(world.leases, pick, amount)]
    reward = (pick % 3) / 2
    if op == "submit":
        submits = []
        for lease in leases:
            body = b"body %d %d %d" % (lease.draw, lease.sample, pick % 13 == 0) * (60 if pick % 3 == 1 else 1 + pick % 3)
            failure, score = "" if pick % 7 else "broke", b"" if pick % 4 else b"score"
            submits.append(Submit(
                lease, body, len(body), 5, 3, steps, b"" if score else b"text", score, failure, reward if score else 0.0,
                bounded=pick % 3 == 1))
        outcomes = await world.call("submit_samples", submits)
        if isinstance(outcomes, list) and (over := [s for s, o in zip(submits, outcomes, strict=True) if o == Outcome.SPILL]):
            await world.call("submit_samples", [dataclasses.replace(s, body=b"key", spilled=len(s.body)) for s in over])
    elif op == "partial":
        await world.call("submit_partials", [
            Partial(lease, b"part" * (pick % 2 + 1), steps * (pick % 2), pick % 3 == 0) for lease in leases])
    elif op == "score":
        await world.call("submit_scores", [
            Scored(_older(lease, pick), b"s" * (1 + n % 2), reward * (n % 2))
            for n, lease in enumerate(_some(world.scoring, pick, amount))])
    else:
        draw = world.state.get("next_draw") - pick % 4
        lease = Lease(max(0, draw), amount % 3, pick % 3, world.state.get("epoch") + amount % 3 - 1)
        await world.call("submit_scores", [Scored(lease, b"s")])
        await world.call("submit_samples", [Submit(lease, b"x", 1, 5, 3, [(0, 1)], b"t")])
        await world.call("submit_partials", [Partial(lease, b"p", [(0, 1)], True)])
        await world.call("heartbeat_samples", [lease])


async def flow(world: World, pick: int, amount: int) -> None:
    """The ordinary case, most of the time undisturbed: grant, submit, score all that was granted, number, publish."""
    granted = await world.call("grant_samples", "w9", 3 + amount, 0)
    world.leases += [g.lease for g in granted.grants]
    slow = pick % 4  # this many stay behind
    newest = world.incarnations[-1]
    steps = [(max(0, world.state.get("published") - pick % 3), newest)]
    done = [g.lease for g in granted.grants][slow:]
    await world.call("submit_samples", [Submit(lease, b"flow" * amount, 4, 5, 3, steps, b"text") for lease in done])
    scoring = [g.lease for g in await world.call("grant_scoring", "r9", 99)]
    world.scoring += scoring
    await world.call("submit_scores", [
        Scored(lease, b"1", (n * (1 + pick) % 3) / 2) for n, lease in enumerate(scoring[pick % 3:])])
    if await _numbered(world, newest, batch := world.state.get("numbered") + 1):
        await world.call("read_batch", batch)
        if pick % 5:
            in_order = min(batch, world.state.get("published") + 1)
            await world.publish(newest, in_order if world.rules.pinned else batch)
    if pick % 6 == 0:
        await world.call("commit", newest, world.committable())


async def _numbered(world: World, incarnation: int, batch: int) -> bool:
    answer = await world.call("number_batch", incarnation, batch)
    return not isinstance(answer, tuple) and answer.numbered


async def _trainer(world: World, op: str, newest: int, pick: int, amount: int) -> None:
    state = world.state
    if op == "publish":
        step = min(world.step, state.get("numbered"))
        number = await world.call("reserve_version", newest, step)
        if isinstance(number, int) and pick % 5:
            world.reserved.append((number, step, newest))
        if world.reserved:
            number, step, incarnation = world.reserved[-1 - pick % 2 if len(world.reserved) > 1 else -1]
            await world.call("publish_version", Version(number, step, incarnation, f"versions/{number}", number * 7))
            await world.call("versions")
            world.step = min(state.get("published") + 1, state.get("numbered"))
    elif op == "hold":
        await world.call("hold_version", 1 + pick % 4, f"r{amount % 2}", amount * 300)
    elif op == "commit":
        await world.call("commit", newest, world.committable() - pick % 3)
    elif op == "incarnation":
        checkpoint = max(0, state.get("committed") + (pick % 3 if pick % 7 else -1))
        if world.rules.pinned:
            checkpoint = min(checkpoint, world.committable())
        behind = (state.get("epoch"), state.get("sequence") + pick % 2) if pick % 13 == 0 else ()
        await _incarnation(world, pick % 3, checkpoint, *behind)
    elif op == "emptied" and pick % 4 == 0:
        await _empty(world, pick, amount)
    elif op == "rebuild" and pick % 3 == 0:
        await _rebuild(world, pick, amount)


async def _incarnation(world: World, above: int, checkpoint: int, *behind: int) -> None:
    taken = await world.call("take_incarnation", above, checkpoint, *behind)
    if not isinstance(taken, tuple):
        world.incarnations.append(taken.incarnation)
        if above != 2:  # else it dies before it publishes
            await world.publish(taken.incarnation, checkpoint)
        world.step = max(0, world.state.get("published"))


async def _rebuild(world: World, pick: int, amount: int) -> None:
    """The ledger is found behind a checkpoint, at times when another front has rebuilt it already."""
    plan = rebuilt_from_log(world, min(world.rules.steps, world.state.get("numbered") + pick % 4), pick, amount)
    await world.call("rebuild", dataclasses.replace(plan, seen_epoch=plan.seen_epoch - (pick % 7 == 0)))
    await _incarnation(world, pick % 3, world.state.get("committed"))


async def _empty(world: World, pick: int, amount: int) -> None:
    """Redis loses everything under live fronts. The next call says so, and a trainer's start rebuilds."""
    plan, newest = rebuilt_from_log(world, world.state.get("numbered"), pick, amount), world.incarnations[-1]
    await world.empty()
    assert (await world.call("sweep"))[1] == "LEDGER_EMPTY"
    assert (await world.call("commit", newest, 0))[1] == "LEDGER_BEHIND"
    assert (await world.call("take_incarnation", newest, plan.committed, plan.epoch, plan.sequence))[1] == "LEDGER_BEHIND"
    await world.call("rebuild", dataclasses.replace(plan, seen_epoch=1))
    await _incarnation(world, newest, plan.committed, plan.epoch, plan.sequence)


def rebuilt_from_log(world: World, numbered: int, pick: int = 0, amount: int = 0) -> Rebuilt:
    """What checkpoint, batch log and store would tell of the ledger as it is now, with `numbered` batches in the log."""
    state, pinned = world.state, world.rules.pinned
    committed = max(state.get("committed"), min(world.committable(), state.get("committed") + amount % 3))
    free, cursor = 0 if pinned else pick % 5, TaskCursor(world.rules.seed, world.rules.weights, TASKS)
    next_draw = numbered * world.rules.groups_per_batch + free
    versions = [Version(n, v["step"], v["inc"], v["key"], v["crc"]) for n, v in sorted(state.version_records.items())
                if v["pub"] and v["step"] <= committed]
    if pinned:  # steps of which this ledger has no record any more
        versions += [Version(90 + s, s, 1, f"versions/{90 + s}", s) for s in range(committed + 1)]
    return Rebuilt(
        seen_epoch=state.get("epoch"), numbered=numbered, committed=committed, next_draw=next_draw,
        version=max(100, state.get("version")), cursor=cursor.counts_before(next_draw), epoch=state.get("epoch") + pick % 2,
        sequence=state.get("sequence") + amount, versions=versions, lost_draws=range(next_draw - free, next_draw))
