"""The ledger in Redis: one typed function beside each script. Redis `TIME`, asked inside the script, is the only clock.

Redis 7.0 commands only, so that Valkey, Redis and the managed services all do. One round trip per call, however long its list.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio as aioredis
from redis import exceptions

from services.buffer import rows
from services.buffer.connection import connect, verify
from services.buffer.cursor import TaskCursor
from services.buffer.ledger import (
    PARTIAL_BYTES,
    SCHEMA,
    Balance,
    BatchedGroup,
    Composition,
    Grant,
    Granted,
    Holders,
    Incarnation,
    Lease,
    Member,
    Numbering,
    OnChange,
    Outcome,
    Partial,
    Published,
    Rebuilt,
    Rules,
    Scored,
    ScoringGrant,
    Submit,
    Version,
    Waiting,
    balance_of,
    refuse,
    shape_of,
)
from services.buffer.scripts import Blob, Scripts
from slipstream.errors import Unavailable

__all__ = ["RedisLedger", "connect", "verify"]
BODIES_AT_ONCE = 1 << 20
BESIDE_BYTES = 16 << 10  # of a body that goes beside its script (see Scripts.run); for less, that costs more than it saves
GROUPS_AT_ONCE = 64  # that one script looks through, so that nobody waits long for it
_EXACT = 1 << 53  # numbers that Lua knows
_OUTCOMES = {o.value: o for o in Outcome}


class RedisLedger:
    """See `Ledger`. `now_ms` replaces the clock in tests alone."""

    def __init__(
            self, client: aioredis.Redis, rules: Rules, now_ms: Callable[[], int] | None = None,
            observe: Callable[[str, float], None] = lambda name, seconds: None) -> None:
        self.rules = rules
        self.on_change: OnChange = lambda topics: None
        self._scripts = Scripts(client, rules.run, {**dataclasses.asdict(rules), "schema": SCHEMA})
        self._observe = observe  # told of each script and its time in seconds
        self._now_ms = now_ms or (lambda: 0)
        self.beside_bytes = BESIDE_BYTES
        self._cursor: TaskCursor | None = None
        self._proposals: list[tuple[str, int]] = []  # tasks of the cursor's positions `_start`, `_start` + 1, ...
        self._tasks: Iterator[tuple[str, int]] = iter(())  # those after them
        self._start = -1  # to be read
        self.groups_at_once = GROUPS_AT_ONCE
        self._ages = b""  # of open groups, as number_batch told them

    async def open(self, tasks: Mapping[str, int]) -> None:
        """Create or join the ledger of the run. ConfigError when its shape or schema differs."""
        self._cursor = TaskCursor(self.rules.seed, self.rules.weights, tasks)
        await self._open()

    async def _open(self) -> None:
        await self._run("open", {"schema": SCHEMA, "shape": shape_of(self.rules)})

    async def _run(
            self, name: str, request: Any, leases: Sequence[Lease] = (), items: bytes = b"", blobs: Sequence[Blob] = (),
            bodies: Sequence[tuple[str, Blob]] = (),
    ) -> tuple[Any, bytes, list[bytes]]:
        scripts = self._scripts
        if scripts.lost_connection and name not in ("open", "grace"):
            await self.grace()  # before anything can expire
        started = time.perf_counter()
        try:
            result, topics, answer, parts = await scripts.run(
                name, request, rows.leases(leases), items, blobs, self._now_ms(), bodies)
        except Unavailable as error:
            if error.reason == "LEDGER_EMPTY":
                await self._open()
            raise
        self._observe(name, time.perf_counter() - started)
        if topics:
            self.on_change(topics)
        return result, answer, parts

    # --- hop 1 and 2

    async def grant_samples(self, worker: str, count: int, loaded: int = 0) -> Granted:
        """Expired leases first, then open samples in draw order, then new draws while the budget allows."""
        grants: list[Grant] = []
        while True:
            wanted = -(-(count - len(grants)) // self.rules.group_size)
            await self._propose(wanted + 8)
            result, granted, partials = await self._run("grant_samples", {
                "worker": worker, "count": count - len(grants), "loaded": loaded, "start": self._start,
                "partial_bytes": PARTIAL_BYTES - sum(len(g.partial) for g in grants),
                "tasks": self._proposals[:wanted + 8]})
            groups, epoch, bodies = result["groups"], result["epoch"], dict(zip(result["partials"], partials, strict=True))
            for n, (place, i, attempt) in enumerate(rows.grants(granted), 1):
                d, e, x, size, least, pinned = groups[place]
                grants.append(Grant(Lease(d, i, attempt, epoch), e, x, size, least, pinned, bodies.get(n, b"")))
            taken, known = max(0, result["position"] - self._start), len(self._proposals)
            del self._proposals[:taken]
            self._start = self._start + taken if taken <= known else -1  # another front drew beyond what is known here
            if not result["stale"]:
                waiting = None if grants else Waiting(result["why"], result["facts"])
                return Granted(grants, waiting, result["finished"])
            self._start = -1  # another front drew, or the ledger was rebuilt: read the cursor again

    async def _propose(self, count: int) -> None:
        """Have the tasks of the next draws at hand: a pure function of the cursor, so that a stale one only costs a retry."""
        if self._start < 0:
            assert self._cursor is not None
            async with self._pipeline() as pipe:
                pipe.hmget(self._scripts.keys["meta"], "next_draw", "x:requeued")
                pipe.hgetall(self._scripts.keys["cursor"])
                (draw, requeued), counts = await pipe.execute()
            self._start, self._proposals = int(draw or 0) - int(requeued or 0), []
            self._tasks = self._cursor.proposals(self._start, {k.decode(): int(v) for k, v in counts.items()})
        while len(self._proposals) < count:
            self._proposals.append(next(self._tasks))

    async def heartbeat_samples(self, leases: Sequence[Lease]) -> list[Outcome]:
        return await self._extend("leases", "a", self.rules.lease_ms, leases)

    async def release_samples(self, leases: Sequence[Lease]) -> list[Outcome]:
        """The lease lapses now: no edge, the sample stays leased(a) until it is granted again."""
        return await self._extend("leases", "a", -1, leases)

    async def _extend(self, queue: str, field: str, ms: int, leases: Sequence[Lease]) -> list[Outcome]:
        request = {"queue": queue, "field": field, "ms": ms}
        return self._outcomes(len(leases), await self._run("extend", request, leases))

    def _outcomes(self, count: int, answer: tuple[Any, bytes, list[bytes]]) -> list[Outcome]:
        """Accepted, but for those that the script named."""
        outcomes = [Outcome.ACCEPTED] * count
        for position, outcome in answer[0]:
            outcomes[position - 1] = _OUTCOMES[outcome]
        return outcomes

    async def submit_samples(self, submits: Sequence[Submit]) -> list[Outcome]:
        """Store finished samples: one script, one fsync, for the whole list."""
        leases, beside = [s.lease for s in submits], self._beside(submits)
        blobs = [part for n, s in enumerate(submits) for part in (b"" if n in beside else s.body, s.score or s.transcript)]
        bodies = [(name, submits[n].body) for n, name in beside.items()]
        answer = await self._run("submit_samples", {}, leases, rows.submits(submits, beside), blobs, bodies)
        return self._outcomes(len(submits), answer)

    def _beside(self, submits: Sequence[Submit]) -> dict[int, str]:
        """Positions and names of the bodies that go beside the script: the large ones, unless one name is there twice."""
        found = {
            n: f"{s.lease.draw}:{s.lease.sample}" for n, s in enumerate(submits)
            if len(s.body) >= self.beside_bytes and not s.failure and s.lease.draw < _EXACT}
        return found if len(set(found.values())) == len(found) else {}

    async def submit_partials(self, partials: Sequence[Partial]) -> list[Outcome]:
        leases, blobs = [p.lease for p in partials], [p.body for p in partials]
        return self._outcomes(len(partials), await self._run("submit_partials", {}, leases, rows.partials(partials), blobs))

    # --- hop 3

    async def grant_scoring(self, worker: str, count: int) -> list[ScoringGrant]:
        """Expired scoring leases first, then the unscored in order of arrival."""
        result, granted, transcripts = await self._run("grant_scoring", {"worker": worker, "count": count})
        groups, epoch, grants = result["groups"], result["epoch"], []
        for (place, i, attempt), transcript in zip(rows.grants(granted), transcripts, strict=True):
            d, e, x = groups[place]
            grants.append(ScoringGrant(Lease(d, i, attempt, epoch), e, x, transcript))
        return grants

    async def heartbeat_scoring(self, leases: Sequence[Lease]) -> list[Outcome]:
        return await self._extend("scoring", "sa", self.rules.scoring_lease_ms, leases)

    async def submit_scores(self, scores: Sequence[Scored]) -> list[Outcome]:
        leases, blobs = [s.lease for s in scores], [s.score for s in scores]
        return self._outcomes(len(scores), await self._run("submit_scores", {}, leases, rows.rewards(scores), blobs))

    # --- hop 4 and 6

    async def take_incarnation(
            self, above: int, checkpoint_batch: int, checkpoint_epoch: int = 0, checkpoint_sequence: int = 0) -> Incarnation:
        """A new fencing number. Batches that the checkpoint covers are committed; published_step falls back to it."""
        result, _, _ = await self._run("take_incarnation", {
            "above": above, "checkpoint": checkpoint_batch, "epoch": checkpoint_epoch, "sequence": checkpoint_sequence})
        return Incarnation(*result)

    async def number_batch(self, incarnation: int, batch: int) -> Numbering:
        """Fix the composition of batch k, or say why it has to wait. OutOfRange unless committed < k <= numbered + 1."""
        most = self.groups_at_once  # twice as many each time, so that it ends however fast groups change
        while "look" in (r := await self._number(incarnation, batch, most)):
            most *= 2
            for first in range(0, len(r["look"]), self.groups_at_once):
                draws = r["look"][first:first + self.groups_at_once]
                self._ages += (await self._run("ages", {"draws": draws}))[1]
        waiting = Waiting(r["why"], r["facts"]) if "why" in r else None
        return Numbering(
            r["numbered"], waiting, r.get("full", False), r.get("finished", False), r.get("sequence", 0),
            r.get("numbered_ms", 0))

    async def _number(self, incarnation: int, batch: int, most: int) -> dict[str, Any]:
        request = {"incarnation": incarnation, "batch": batch, "most": most}
        result, ages, _ = await self._run("number_batch", request, items=self._ages)
        self._ages = ages or self._ages
        return result

    async def read_batch(self, batch: int) -> Composition:
        """The composition with its bodies. OutOfRange unless numbered and uncommitted."""
        groups: list[BatchedGroup] = []
        while True:
            request = {"batch": batch, "first": len(groups), "most": self.groups_at_once}
            result, packed, scores = await self._run("read_batch", request)
            infos = list(rows.members(packed))
            draws = [d for d, *_, size in result["groups"] for _ in range(size)]
            names = [f"{draw}:{info.sample}" for draw, info in zip(draws, infos, strict=True)]
            bodies = await self._bodies(names, [info.size for info in infos])
            if not all(bodies):
                continue  # committed meanwhile: the script says so
            members = [
                Member(i.sample, body, i.crc32c, score, i.oldest_step, i.newest_step, i.tokens, i.generated_tokens, i.spilled)
                for i, body, score in zip(infos, bodies, scores, strict=True)]
            following = iter(members)
            groups += [
                BatchedGroup(d, e, x, n, lag, mask, list(itertools.islice(following, size)), bool(quiet))
                for d, e, x, n, lag, mask, quiet, size in result["groups"]]
            if len(groups) == result["of"]:
                break
        return Composition(
            batch, result["epoch"], result["sequence"], groups, [(d, r) for d, r in result["drops"]], result["numbered_ms"],
            result["next_draw"], list(result["live"]))

    async def _bodies(self, names: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Bodies of these samples, about BODIES_AT_ONCE bytes per command, between which others have their turn."""
        bodies: list[bytes] = []
        while len(bodies) < len(names):
            first, held = len(bodies), 0
            last = first
            while last < len(names) and (last == first or held + sizes[last] <= BODIES_AT_ONCE):
                held += sizes[last]
                last += 1
            async with self._pipeline() as pipe:
                pipe.hmget(self._scripts.keys["bodies"], names[first:last])
                bodies += (await pipe.execute())[0]
        return bodies

    async def commit(self, incarnation: int, through_batch: int) -> int:
        """Close the rows of all batches up to k and free their bodies. Idempotent."""
        while True:
            committed, _, _ = await self._run("commit", {"incarnation": incarnation, "through": through_batch, "most": 1})
            if committed >= through_batch:
                return committed

    async def rebuild(self, plan: Rebuilt) -> None:
        """Start over behind a lost ledger: a new epoch; batches known from the log are numbered, other draws are lost."""
        await self._run("rebuild", {
            **dataclasses.asdict(plan), "lost_draws": list(plan.lost_draws), "cursor": dict(plan.cursor),
            "versions": [dataclasses.astuple(v) for v in plan.versions]})
        self._start = -1

    # --- hop 5 and 7

    async def reserve_version(self, incarnation: int, step: int) -> int:
        """A publication number above all earlier ones."""
        result, _, _ = await self._run("reserve_version", {"incarnation": incarnation, "step": step})
        return result

    async def publish_version(self, version: Version, next_step: int = 0) -> Published:
        """Make a reserved version known; with `next_step`, reserve the number of that step's version, too."""
        result, _, _ = await self._run("publish_version", {
            "number": version.number, "step": version.step, "incarnation": version.incarnation,
            "key": version.manifest_key, "crc": version.manifest_crc32c, "next_step": next_step})
        deletable, versions = ([Version(*row) for row in result[name] or ()] for name in ("deletable", "versions"))
        return Published(deletable, versions, result["next_number"])

    async def hold_version(self, number: int, reader: str, ttl_ms: int) -> None:
        """Keep a version from deletion while it is read. NotFound when it is gone."""
        await self._run("hold_version", {"number": number, "reader": reader, "ms": ttl_ms})

    async def versions(self) -> list[Version]:
        """Versions that may be loaded, newest first."""
        result, _, _ = await self._run("list_versions", {})
        return [Version(*row) for row in result or ()]

    # --- upkeep

    async def sweep(self) -> None:
        """Drop groups over their deadline; forget lapsed holds."""
        await self._run("sweep", {})

    async def grace(self) -> None:
        """After an outage of Redis or of this service, no lease expires for one lease period."""
        await self._scripts.run("grace", {}, now_ms=self._now_ms())
        self._scripts.lost_connection = False
        self.on_change(("samples", "unscored", "ready", "versions"))

    async def balance(self) -> Balance:
        keys = self._scripts.keys
        async with self._pipeline() as pipe:
            pipe.hgetall(keys["meta"])
            pipe.xlen(keys["ready"])
            raw, ready = await pipe.execute()
        if not raw:
            await self._open()
            refuse("unopened", {"run": self.rules.run})
        meta: dict[str, Any] = {k.decode(): int(v) for k, v in raw.items() if k != b"lineage"}
        if meta["schema"] != SCHEMA:
            refuse("overtaken", {"found": meta["schema"], "known": SCHEMA, "run": self.rules.run})
        return balance_of({**meta, "ready": ready}, self.rules)

    async def holders(self, leases: bool = True) -> Holders:
        """The balance and who holds leases. Its cost grows with leases and open groups: for people, not for every commit."""
        r, _, _ = await self._run("holders", {"leases": leases})
        meta = {name: int(value) for name, value in r["meta"].items()}
        return Holders(balance_of({**meta, "ready": r["ready"]}, self.rules), int(r["low"]), r["sample"], r["scoring"])

    async def archive(self) -> list[dict[str, Any]]:
        """Lines of the event and dead-letter logs, oldest first, to be written elsewhere and then trimmed."""
        lines = []
        for name in ("events", "dead"):
            async with self._pipeline() as pipe:
                pipe.xrange(self._scripts.keys[name], count=10_000)
                entries = (await pipe.execute())[0]
            lines += [dict(json.loads(fields[b"line"]), log=name, id=entry.decode()) for entry, fields in entries]
        return lines

    async def trim(self, lines: Sequence[dict[str, Any]]) -> None:
        """Forget archived lines."""
        for name in ("events", "dead"):
            if ids := [line["id"] for line in lines if line["log"] == name]:
                async with self._pipeline() as pipe:
                    pipe.xdel(self._scripts.keys[name], *ids)
                    await pipe.execute()

    @asynccontextmanager
    async def _pipeline(self) -> AsyncIterator[Any]:
        """Plain commands in one transaction; server errors become ours."""
        async with self._scripts.flight, self._scripts.client.pipeline(transaction=True) as pipe:
            try:
                yield pipe
            except (exceptions.RedisError, OSError) as error:
                raise await self._scripts.failed(error) from error
