"""The ledger in memory: the readable definition of every transition, and the oracle of the property tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.buffer.cursor import TaskCursor
from services.buffer.ledger import (
    PARTIAL_BYTES,
    SCHEMA,
    Grant,
    Granted,
    Lease,
    OnChange,
    Outcome,
    Partial,
    Rules,
    Scored,
    ScoringGrant,
    Submit,
    Waiting,
    refuse,
    shape_of,
)
from services.buffer.memory_batches import MemoryBatches
from services.buffer.memory_state import Key, MemoryState, Record


class MemoryLedger(MemoryBatches):
    """See `Ledger`. `now_ms` is the only clock."""

    def __init__(self, rules: Rules, now_ms: Callable[[], int] = lambda: int(time.time() * 1000)) -> None:
        self.rules = rules
        self.on_change: OnChange = lambda topics: None
        self._state = MemoryState(rules, now_ms)
        self._cursor: TaskCursor | None = None

    async def open(self, tasks: Mapping[str, int]) -> None:
        """Create or join the ledger of the run. ConfigError when its shape differs."""
        meta, shape = self._state.meta, shape_of(self.rules)
        self._cursor = TaskCursor(self.rules.seed, self.rules.weights, tasks)
        if not meta:
            self._create()
        if meta["schema"] != SCHEMA:
            refuse("schema", {"found": meta["schema"], "known": SCHEMA, "run": self.rules.run})
        for field, value in shape.items():
            if meta[field] != value:
                refuse("shape", {"field": field, "given": value, "found": meta[field], "run": self.rules.run})
        await self.grace()

    def _create(self) -> None:
        self._state.meta.update(
            schema=SCHEMA, epoch=1, published=-1, estimate=self.rules.sample_bytes, grace=self._grace_end(),
            **shape_of(self.rules))

    # --- hop 1 and 2

    async def grant_samples(self, worker: str, count: int, loaded: int = 0) -> Granted:
        """Expired leases first, then open samples in draw order, then new draws while the budget allows."""
        state, grants = self.state, []
        now = state.now_ms()
        due = now if now >= state.get("grace") else 0
        for key in by_deadline(state.leases, due) + sorted(state.open_samples):
            if _room(grants, count):
                self._grant(key, worker, loaded, grants)
        refusal = state.draw_refusal()
        while _room(grants, count) and refusal is None:
            draw = self._draw()
            for index in range(self.rules.group_size):
                if _room(grants, count):
                    self._grant((draw, index), worker, loaded, grants)
            refusal = state.draw_refusal()
        finished = state.get("numbered") >= self.rules.steps
        self._notify()
        return Granted(grants, None if grants else self._lease_waiting(refusal or "none"), finished)

    def _grant(self, key: Key, worker: str, loaded: int, grants: list[Grant]) -> None:
        state, (draw, index) = self.state, key
        if (group := state.groups.get(draw)) is None:
            return  # dropped a moment ago, in this very call
        sample, pinned = group["s"][index], 0
        if sample["a"] >= self.rules.max_attempts:
            state.fail(key, sample, "attempts")
            state.settle(draw)
            return
        if group["p"] >= 0 and not (pinned := state.pinned_version(group["p"]) or 0):
            return
        state.open_samples.discard(key)
        if state.leases.get(key, 0) > 0:
            state.add("expired", 1)  # its holder was silent; a released lease has 0
        state.leases[key] = state.now_ms() + self.rules.lease_ms
        state.move(sample, "leased")
        least = state.least_step(group)
        sample.update(a=sample["a"] + 1, w=worker, g=self._start_of(loaded, least))
        sample.setdefault("t", state.now_ms())
        grants.append(Grant(
            Lease(draw, index, sample["a"], state.meta["epoch"]), group["e"], group["x"], group["n"], least, pinned,
            state.partials.get(key, b"")))

    def _start_of(self, loaded: int, least: int) -> list[int]:
        """[step, incarnation] from which a grant's tokens start: what the worker has loaded, but no less than it must."""
        version = self.state.version_records.get(loaded)
        if version and version["pub"] and self.state.effective(version["step"], version["inc"]) >= least:
            return [version["step"], version["inc"]]
        return [least, self.state.get("incarnation")]

    def _draw(self) -> int:
        assert self._cursor is not None
        state = self.state
        environment, index = next(self._cursor.proposals(state.cursor_position(), state.cursor))
        state.cursor[environment] = state.cursor.get(environment, 0) + 1
        return state.make_draw(environment, index)

    def _lease_waiting(self, why: str) -> Waiting:
        state = self.state
        return Waiting(why, {
            "draw": state.get("next_draw"), "published": state.get("published"), "outstanding": state.outstanding(),
            "open": len(state.open_samples), "leased": len(state.leases), "bytes": state.get("bytes") + state.get("reserved"),
            "numbered": state.get("numbered")})

    async def heartbeat_samples(self, leases: Sequence[Lease]) -> list[Outcome]:
        return [self._extend(lease, self.state.leases, "a", self.rules.lease_ms) for lease in leases]

    async def release_samples(self, leases: Sequence[Lease]) -> list[Outcome]:
        """The lease lapses now: no edge, the sample stays leased(a) until it is granted again."""
        outcomes = [self._extend(lease, self.state.leases, "a", None) for lease in leases]
        self.state.changed.add("samples")
        self._notify()
        return outcomes

    def _extend(self, lease: Lease, table: dict[Key, int], field: str, ms: int | None) -> Outcome:
        key, sample = (lease.draw, lease.sample), self.state.find(lease)
        if sample is None:
            return Outcome.OUTDATED if self.state.is_past(lease) else Outcome.UNKNOWN
        if lease.attempt > sample[field]:
            return Outcome.UNKNOWN
        if lease.attempt < sample[field] or key not in table or (ms is not None and table[key] == 0):
            return Outcome.FENCED
        table[key] = self.state.now_ms() + ms if ms is not None else 0
        return Outcome.ACCEPTED

    async def submit_samples(self, submits: Sequence[Submit]) -> list[Outcome]:
        """Groups are settled once the whole list is taken, so that its order does not matter."""
        outcomes = [self._submit(submit) for submit in submits]
        self._settle(s.lease for s in submits)
        return outcomes

    def _submit(self, submit: Submit) -> Outcome:
        state, lease = self.state, submit.lease
        key, sample = (lease.draw, lease.sample), state.find(lease)
        if sample is None:
            return Outcome.OUTDATED if state.is_past(lease) else Outcome.UNKNOWN
        if sample["st"] == "closed":
            return Outcome.OUTDATED
        if lease.attempt > sample["a"]:
            return Outcome.UNKNOWN
        if lease.attempt < sample["a"] or sample["st"] == "partial":
            return Outcome.FENCED
        if sample["st"] != "leased":
            return Outcome.ACCEPTED if sample["c"] == submit.crc32c else Outcome.CONFLICT
        if submit.failure:
            state.fail(key, sample, submit.failure)
            return Outcome.ACCEPTED
        size = len(submit.body) + len(submit.score or submit.transcript)
        if submit.bounded and state.get("bytes") + size > self.rules.quota_bytes:
            return Outcome.SPILL
        self._store(key, sample, submit)
        return Outcome.ACCEPTED

    def _store(self, key: Key, sample: Record, submit: Submit) -> None:
        state = self.state
        state.leases.pop(key, None)
        state.unreserve(sample)
        state.partials.pop(key, None)
        state.hold(sample, "lp", 0)
        sample.pop("pp", None)
        sample.update(c=submit.crc32c, tok=submit.tokens, gen=submit.generated_tokens, sp=[list(p) for p in submit.steps])
        if submit.score:
            sample["rw"] = submit.reward
        state.bodies[key] = bytes(submit.body)  # of a stream it is a view of a frame
        state.hold(sample, "lb", len(submit.body))
        sample["sb"] = submit.spilled
        size = (submit.spilled or len(submit.body)) + len(submit.transcript)
        state.meta["estimate"] = state.get("estimate") + (size - state.get("estimate")) // 16
        if submit.score:
            state.move(sample, "scored")
            state.scores[key] = submit.score
            state.hold(sample, "ls", len(submit.score))
            return
        state.move(sample, "unscored")
        state.transcripts[key] = submit.transcript
        state.hold(sample, "lt", len(submit.transcript))
        state.unscored.append(key)
        state.changed.add("unscored")

    async def submit_partials(self, partials: Sequence[Partial]) -> list[Outcome]:
        outcomes = [self._submit_partial(p) for p in partials]
        self._notify()
        return outcomes

    def _submit_partial(self, partial: Partial) -> Outcome:
        state, lease = self.state, partial.lease
        key, sample = (lease.draw, lease.sample), state.find(lease)
        if sample is None:
            return Outcome.OUTDATED if state.is_past(lease) else Outcome.UNKNOWN
        if lease.attempt > sample["a"]:
            return Outcome.UNKNOWN
        if lease.attempt == sample["a"] and sample["st"] == "partial":
            return Outcome.ACCEPTED  # a repeat: the lease was given back with it
        if lease.attempt < sample["a"] or sample["st"] != "leased":
            return Outcome.FENCED
        state.partials[key] = partial.body
        state.hold(sample, "lp", len(partial.body))
        sample.pop("pp", None)
        if partial.steps:
            sample["pp"] = [list(p) for p in partial.steps]
        if partial.release:
            state.leases.pop(key, None)
            state.move(sample, "partial")
            state.open_samples.add(key)
            state.changed.add("samples")
        return Outcome.ACCEPTED

    # --- hop 3

    async def grant_scoring(self, worker: str, count: int) -> list[ScoringGrant]:
        """Expired scoring leases first, then the unscored in order of arrival."""
        state, grants = self.state, []
        now = state.now_ms()
        due = now if now >= state.get("grace") else 0
        for key in by_deadline(state.scoring, due):
            if len(grants) < count and key in state.scoring:
                sample = state.groups[key[0]]["s"][key[1]]
                state.move(sample, "unscored")
                state.add("scoring_expired", 1)
                del state.scoring[key]
                self._grant_scoring(key, sample, worker, grants)
        while len(grants) < count and state.unscored:
            key = state.unscored.pop(0)
            group = state.groups.get(key[0])
            if group and group["s"][key[1]]["st"] == "unscored":
                self._grant_scoring(key, group["s"][key[1]], worker, grants)
        self._notify()
        return grants

    def _grant_scoring(self, key: Key, sample: Record, worker: str, grants: list[ScoringGrant]) -> None:
        state, (draw, index) = self.state, key
        if sample["sa"] >= self.rules.max_attempts:
            state.fail(key, sample, "scoring attempts")
            state.settle(draw)
            return
        state.move(sample, "scoring")
        sample.update(sa=sample["sa"] + 1, sw=worker)
        state.scoring[key] = state.now_ms() + self.rules.scoring_lease_ms
        group = state.groups[draw]
        grants.append(ScoringGrant(
            Lease(draw, index, sample["sa"], state.meta["epoch"]), group["e"], group["x"], state.transcripts[key]))

    async def heartbeat_scoring(self, leases: Sequence[Lease]) -> list[Outcome]:
        return [self._extend(lease, self.state.scoring, "sa", self.rules.scoring_lease_ms) for lease in leases]

    async def submit_scores(self, scores: Sequence[Scored]) -> list[Outcome]:
        outcomes = [self._submit_score(s) for s in scores]
        self._settle(s.lease for s in scores)
        return outcomes

    def _submit_score(self, scored: Scored) -> Outcome:
        state, lease = self.state, scored.lease
        key, sample = (lease.draw, lease.sample), state.find(lease)
        if sample is None:
            return Outcome.OUTDATED if state.is_past(lease) else Outcome.UNKNOWN
        if sample["st"] == "closed":
            return Outcome.OUTDATED
        if lease.attempt > sample["sa"]:
            return Outcome.UNKNOWN
        if lease.attempt < sample["sa"]:
            return Outcome.FENCED
        if sample["st"] == "scored":
            return Outcome.ACCEPTED
        sample["rw"] = scored.reward
        state.scoring.pop(key, None)
        state.transcripts.pop(key, None)
        state.hold(sample, "lt", 0)
        state.scores[key] = scored.score
        state.hold(sample, "ls", len(scored.score))
        state.move(sample, "scored")
        return Outcome.ACCEPTED

    def _settle(self, leases: Iterable[Lease]) -> None:
        for draw in sorted({lease.draw for lease in leases if self.state.find(lease)}):
            self.state.settle(draw)
        self._notify()

    def _notify(self) -> None:
        changed, self.state.changed = sorted(self.state.changed), set()
        if changed:
            self.on_change(changed)


def _room(grants: Sequence[Grant], count: int) -> bool:
    return len(grants) < count and sum(len(g.partial) for g in grants) < PARTIAL_BYTES


def by_deadline(table: Mapping[Key, int], due: int) -> list[Key]:
    """Keys whose deadline is reached, oldest first; ties in the order of a Redis sorted set (by text)."""
    lapsed = [key for key, deadline in table.items() if deadline <= due]
    return sorted(lapsed, key=lambda key: (table[key], f"{key[0]}:{key[1]}"))
