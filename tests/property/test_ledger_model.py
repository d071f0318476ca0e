"""The Redis ledger equals the readable in-memory model, transition for transition, under random programs.

Hypothesis writes the programs (grant, heartbeat, expiry, submit, repeat, old attempts, partials, release, score, number,
commit, publish, restart of the trainer, several environments and over-lag policies). After every operation both ledgers must
have given the same answer, hold the same contents, and add up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.buffer.ledger import Lease, Partial, Rules, Scored, Submit, Version
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.redis_ledger import RedisLedger, connect
from services.buffer.scripts import NAMES
from slipstream.errors import SlipstreamError
from tests.redis_server import RedisProcess, redis_process

TASKS = {"a": 5, "b": 0, "c": 3}
FREE = Rules(
    run="model", seed=7, steps=6, groups_per_batch=2, group_size=2, max_lag=1, pinned=False, lease_ms=1000,
    scoring_lease_ms=700, max_attempts=3, group_timeout_ms=9000, quota_bytes=2500, sample_bytes=60, keep_versions=2,
    over_lag={"a": "wait", "b": "mask", "c": "drop"}, weights={"a": 2.0, "b": 1.0, "c": 1.0})
PINNED = dataclasses.replace(FREE, pinned=True, group_timeout_ms=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_process(Path(tmp_path_factory.mktemp("model"))) as process:
        yield process


class Pair:
    """Both ledgers under one clock, and what the actors remember of their leases."""

    def __init__(self, url: str, rules: Rules) -> None:
        self.rules, self.now = rules, 1_000_000
        self.client = connect(url)
        self.model = MemoryLedger(rules, lambda: self.now)
        self.real = RedisLedger(self.client, rules, lambda: self.now)
        self.leases: list[Lease] = []
        self.scoring: list[Lease] = []
        self.reserved: list[tuple[int, int, int]] = []
        self.incarnations = [0]
        self.step = 0

    async def both(self, method: str, *args: Any) -> Any:
        """Call both; the answers or the errors must be equal."""
        answers = []
        for ledger in (self.model, self.real):
            try:
                answers.append(await getattr(ledger, method)(*args))
            except SlipstreamError as error:
                answers.append((type(error), error.reason, error.metadata))
        assert answers[1] == answers[0], f"{method}{args}: model {answers[0]}, Redis {answers[1]}"
        real, model = await contents(self.client, self.real), comparable(dict(self.model.state.contents()))
        assert _plain(real) == _plain(model), f"after {method}{args}"
        balance = await self.real.balance()
        balance.check(self.rules.group_size)
        for part in ("meta", "samples", "groups", "dropped"):
            assert _nonzero(getattr(balance, part)) == _nonzero(getattr(await self.model.balance(), part))
        return answers[0]


class Reader:
    """Reads what a script packed: the layouts GROUP and FORMS of ledger.lua."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.position = raw, 0

    def values(self, form: str) -> tuple[Any, ...]:
        self.position += struct.calcsize("<" + form)
        return struct.unpack_from("<" + form, self.raw, self.position - struct.calcsize("<" + form))

    def data(self, length: str = "I") -> bytes:
        """With a length in front."""
        size = self.values(length)[0]
        self.position += size
        return self.raw[self.position - size:self.position]

    def state(self) -> str:
        """Up to a zero byte."""
        start, self.position = self.position, self.raw.index(b"\0", self.position) + 1
        return self.raw[start:self.position - 1].decode()


def unpack_group(raw: bytes) -> dict[str, Any]:
    """A packed group in the model's shape; what is nothing is left out."""
    reader = Reader(raw)
    group: dict[str, Any] = {"e": reader.data().decode()}
    group.update(zip("xntmp", reader.values("QHQQq"), strict=True), st=reader.state())
    group["k"], reserved, group["held"] = reader.values("QIQ")
    reader.data("H")  # its entry of `ready`
    group["s"] = [_unpack_sample(reader, reserved) for _ in range(group["n"])]
    return group


def _unpack_sample(reader: Reader, reserved: int) -> dict[str, Any]:
    sample: dict[str, Any] = {"st": reader.state()}
    sample["a"], sample["sa"] = reader.values("HH")
    holder, part, info, scorer, why = (reader.data() for _ in range(5))
    sample.update(w=holder[8:].decode(), sw=scorer.decode(), why=why.decode())
    if holder:
        sample["g"] = _pairs(holder[:8])[0]
    if part:
        sample.update(lp=struct.unpack("<I", part[:4])[0], pp=_pairs(part[4:]))
    if info:
        sample.update(zip(("c", "tok", "gen", "lb", "lt"), struct.unpack("<5I", info[:20]), strict=True), sp=_pairs(info[20:]))
    if sample["st"] in ("open", "leased", "partial"):
        sample["r"] = reserved
    return sample


def _pairs(data: bytes) -> list[list[int]]:
    return [list(pair) for pair in struct.iter_unpack("<II", data)]


HOLDS = {
    "lb": ("unscored", "scoring", "scored"), "lt": ("unscored", "scoring"), "ls": ("scored",), "lp": ("leased", "partial")}


def same_form(groups: dict[int, dict[str, Any]], scores: dict[Any, bytes]) -> dict[int, dict[str, Any]]:
    """Groups as both ledgers can tell them: no fields that are nothing, sizes only of what a sample in its state can hold."""
    out = {}
    for draw, group in groups.items():
        samples = []
        for index, sample in enumerate(group["s"]):
            sample = {**sample, "ls": len(scores.get((draw, index), b""))}
            for part, states in HOLDS.items():
                if sample["st"] not in states:
                    sample.pop(part, None)
            samples.append({k: v for k, v in sample.items() if v})
        held = sum(s.get(part, 0) for s in samples for part in HOLDS)
        assert group.get("held", held) == held, f"{group}: holds {held} bytes"
        out[draw] = {**group, "s": samples, "held": held}
    return out


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Contents in a common form. Entries of `unscored` name samples that may be gone or granted: only the others count."""
    groups = state["groups"] = same_form(state["groups"], state["scores"])
    state["unscored"] = [(d, i) for d, i in state["unscored"] if d in groups and groups[d]["s"][i]["st"] == "unscored"]
    return state


async def contents(client: Any, ledger: RedisLedger) -> dict[str, Any]:
    """What Redis holds, in the model's shape."""
    async with client.pipeline() as pipe:
        keys = ledger._scripts.keys
        for name in NAMES:
            if name in ("open", "leases", "scoring", "holds", "unfinished"):
                pipe.zrange(keys[name], 0, -1, withscores=True)
            elif name in ("unscored", "ready", "events", "dead"):
                pipe.xrange(keys[name])
            elif name == "drops":
                pipe.lrange(keys[name], 0, -1)
            else:
                pipe.hgetall(keys[name])
        raw = dict(zip(NAMES, await pipe.execute(), strict=True))
    meta = {k.decode(): v.decode() for k, v in raw["meta"].items()}
    lineage = json.loads(meta.pop("lineage", "[]"))
    groups = {int(d): unpack_group(g) for d, g in raw["groups"].items()}
    out: dict[str, Any] = {
        "meta": {k: int(v) for k, v in meta.items() if int(v)}, "lineage": lineage, "groups": groups,
        "open": sorted(_key(m) for m, _ in raw["open"]), "unfinished": [int(d) for d, _ in raw["unfinished"]],
        "unscored": [key for _, f in raw["unscored"] for key in struct.iter_unpack("<QI", f[b"s"])],
        "ready": [int(f[b"draw"]) for _, f in raw["ready"]],
        "drops": [json.loads(d) for d in raw["drops"]],
        "versions": {int(n): json.loads(v) for n, v in raw["versions"].items()},
        "batches": {int(n): json.loads(v) for n, v in raw["batches"].items()},
        "holds": {(int(m.split(b":")[0]), m.split(b":", 1)[1].decode()): int(t) for m, t in raw["holds"]},
        "cursor": {k.decode(): int(v) for k, v in raw["cursor"].items()}}
    for name in ("leases", "scoring"):
        out[name] = {_key(m): int(t) for m, t in raw[name]}
    for name in ("bodies", "transcripts", "scores", "partials"):
        out[name] = {_key(m): v for m, v in raw[name].items()}
    for name in ("events", "dead"):
        out[name] = [json.loads(f[b"line"]) for _, f in raw[name]]
    return comparable(out)


def _key(member: bytes) -> tuple[int, int]:
    draw, index = member.split(b":")
    return int(draw), int(index)


def _nonzero(counters: Any) -> dict[str, int]:
    return {k: v for k, v in counters.items() if v}


def _plain(value: Any) -> Any:
    """Tuples as lists, Lua's empty table as an empty list."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in sorted(value.items())} or []
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


async def act(pair: Pair, op: str, pick: int, amount: int) -> None:
    """One step of a program. `pick` chooses among known leases, `amount` is a count, a variant or a time."""
    def some(leases: list[Lease]) -> list[Lease]:
        return [leases[(pick + n) % len(leases)] for n in range(min(amount, len(leases)))] if leases else []

    def older(lease: Lease) -> Lease:
        return lease._replace(attempt=lease.attempt + (-1 if pick % 5 == 0 else 1 if pick % 31 == 0 else 0))

    newest = pair.incarnations[-1] if pick % 11 else pair.incarnations[0]
    steps = tuple({(max(0, pair.step - pick % 3), newest), (max(0, pair.step - pick % 2), newest)})
    if op == "flow":
        await flow(pair, pick, amount)
    elif op == "grant":
        granted = await pair.both("grant_samples", f"w{pick % 2}", amount, pick % 4)
        pair.leases += [g.lease for g in granted.grants]
    elif op in ("heartbeat_samples", "release_samples"):
        await pair.both(op, [older(lease) for lease in some(pair.leases)])
    elif op == "submit":
        submits = []
        for lease in some(pair.leases):
            body = b"body %d %d %d" % (lease.draw, lease.sample, pick % 13 == 0) * (1 + pick % 3)
            score = b"" if pick % 4 else b"score"
            failure, transcript = "" if pick % 17 else "broke", b"" if score else b"text"
            submits.append(Submit(older(lease), body, len(body), 5, 3, sorted(steps), transcript, score, failure))
        await pair.both("submit_samples", submits)
    elif op == "partial":
        partials = [Partial(older(lease), b"part", sorted(steps) * (pick % 2), pick % 3 == 0) for lease in some(pair.leases)]
        await pair.both("submit_partials", partials)
    elif op == "grant_scoring":
        pair.scoring += [g.lease for g in await pair.both("grant_scoring", "r0", amount)]
    elif op == "heartbeat_scoring":
        await pair.both(op, [older(lease) for lease in some(pair.scoring)])
    elif op == "score":
        await pair.both("submit_scores", [Scored(older(lease), b"s" * (1 + pick % 3)) for lease in some(pair.scoring)])
    elif op == "number":
        batch = pair.model.state.get("numbered") + 1 - pick % 2
        if (await _numbered(pair, newest, batch)) and pick % 3 == 0:
            await pair.both("read_batch", batch)
    else:
        await act_trainer(pair, op, newest, pick, amount)


async def flow(pair: Pair, pick: int, amount: int) -> None:
    """The ordinary case, most of the time undisturbed: grant, submit, score all that was granted, number, publish."""
    granted = await pair.both("grant_samples", "w9", 3 + amount, 0)
    pair.leases += [g.lease for g in granted.grants]
    slow = pick % 4  # this many stay behind
    newest = pair.incarnations[-1]
    steps = [(max(0, pair.model.state.get("published") - pick % 3), newest)]
    done = [g.lease for g in granted.grants][slow:]
    await pair.both("submit_samples", [Submit(lease, b"flow" * amount, 4, 5, 3, steps, b"text") for lease in done])
    scoring = [g.lease for g in await pair.both("grant_scoring", "r9", 99)]
    pair.scoring += scoring
    await pair.both("submit_scores", [Scored(lease, b"1") for lease in scoring[pick % 3:]])
    if await _numbered(pair, newest, batch := pair.model.state.get("numbered") + 1):
        await pair.both("read_batch", batch)
        if pick % 5:
            await publish(pair, newest, batch)
    if pick % 6 == 0:
        await pair.both("commit", newest, pair.model.state.get("numbered"))


async def publish(pair: Pair, incarnation: int, step: int) -> None:
    number = await pair.both("reserve_version", incarnation, step)
    await pair.both("publish_version", Version(number, step, incarnation, f"versions/{number}", number * 7))


async def _numbered(pair: Pair, incarnation: int, batch: int) -> bool:
    answer = await pair.both("number_batch", incarnation, batch)
    return not isinstance(answer, tuple) and answer.numbered


async def act_trainer(pair: Pair, op: str, newest: int, pick: int, amount: int) -> None:
    state = pair.model.state
    if op == "publish":
        step = min(pair.step, state.get("numbered"))
        number = await pair.both("reserve_version", newest, step)
        if isinstance(number, int) and pick % 5:
            pair.reserved.append((number, step, newest))
        if pair.reserved:
            number, step, incarnation = pair.reserved[-1 - pick % 2 if len(pair.reserved) > 1 else -1]
            await pair.both("publish_version", Version(number, step, incarnation, f"versions/{number}", number * 7))
            await pair.both("versions")
            pair.step = min(state.get("published") + 1, state.get("numbered"))
    elif op == "hold":
        await pair.both("hold_version", 1 + pick % 4, f"r{amount % 2}", amount * 300)
    elif op == "commit":
        await pair.both("commit", newest, state.get("numbered") - pick % 3)
    elif op == "incarnation":
        checkpoint = state.get("committed") + (pick % 3 if pick % 7 else -1)
        taken = await pair.both("take_incarnation", pick % 3, max(0, checkpoint))
        if not isinstance(taken, tuple):
            pair.incarnations.append(taken.incarnation)
            pair.step = max(0, state.get("published"))
    elif op == "rebuild" and pick % 4 == 0:
        numbered, committed = state.get("numbered") + pick % 2, state.get("committed")
        await pair.both("rebuild", numbered, committed, numbered * 2 + pick % 5, 20 + pick, {"a": pick, "b": 2})
    elif op == "time":
        pair.now += amount * 150 if pick % 6 else amount * 1500
        await pair.both("sweep")
    elif op == "grace" and pick % 3 == 0:
        await pair.both("grace")


WEIGHTS = {
    "flow": 9, "grant": 3, "submit": 3, "grant_scoring": 2, "score": 3, "number": 3, "publish": 3, "time": 2,
    "heartbeat_samples": 1, "release_samples": 1, "partial": 1, "heartbeat_scoring": 1, "commit": 1, "incarnation": 1,
    "hold": 1, "grace": 1, "rebuild": 1}
OPERATIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
PROGRAM = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 400), st.integers(1, 8)), min_size=15, max_size=50)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=QUIET)
@given(program=PROGRAM, pinned=st.booleans())
def test_redis_equals_the_model(server: RedisProcess, program: list[tuple[str, int, int]], pinned: bool) -> None:
    """Any program: equal answers, equal contents, a balance that adds up."""
    run_program(server, program, pinned)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(program=PROGRAM, pinned=st.booleans())
def test_redis_equals_the_model_in_many_programs(
        server: RedisProcess, program: list[tuple[str, int, int]], pinned: bool) -> None:
    """The same, longer."""
    run_program(server, program, pinned)


def run_program(server: RedisProcess, program: list[tuple[str, int, int]], pinned: bool) -> None:
    async def run() -> None:
        pair = Pair(server.url, PINNED if pinned else FREE)
        await pair.client.flushall()
        await pair.both("open", TASKS)
        pair.incarnations.append((await pair.both("take_incarnation", 0, 0)).incarnation)
        number = await pair.both("reserve_version", 1, 0)
        await pair.both("publish_version", Version(number, 0, 1, "versions/1", 7))
        for op, pick, amount in program:
            await act(pair, op, pick, amount)
        await pair.client.aclose()
    asyncio.run(run())
