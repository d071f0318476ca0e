"""The in-memory ledger's batches, policy versions and upkeep (hops 4 to 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from services.buffer.ledger import (
    SCHEMA,
    Balance,
    BatchedGroup,
    Composition,
    Holders,
    Incarnation,
    Member,
    Numbering,
    Published,
    Rebuilt,
    Rules,
    Version,
    Waiting,
    balance_of,
    refuse,
)
from services.buffer.memory_state import TERMINAL, MemoryState, Record


class MemoryBatches:
    """Half of `MemoryLedger`: everything that the trainer calls."""

    rules: Rules
    _state: MemoryState

    @property
    def state(self) -> MemoryState:
        """The tables. When they were emptied, the ledger is created anew and Unavailable(LEDGER_EMPTY) raised."""
        if not self._state.meta:
            self._create()
            refuse("unopened", {"run": self.rules.run})
        if (found := self._state.meta["schema"]) != SCHEMA:
            refuse("overtaken", {"found": found, "known": SCHEMA, "run": self.rules.run})
        return self._state

    def _create(self) -> None:
        raise NotImplementedError

    def _notify(self) -> None:
        raise NotImplementedError

    def _fence(self, incarnation: int) -> None:
        if incarnation != (newest := self.state.get("incarnation")):
            refuse("fenced", {"given": incarnation, "newest": newest})

    # --- hop 4

    async def take_incarnation(
            self, above: int, checkpoint_batch: int, checkpoint_epoch: int = 0, checkpoint_sequence: int = 0) -> Incarnation:
        """A new fencing number. Batches that the checkpoint covers are committed; published_step falls back to it.

        Fenced(LEDGER_BEHIND) when the checkpoint knows more than this ledger, which was lost or rewound then; Fenced(FORK) when
        it knows less than what is committed.
        """
        state = self.state
        numbered, committed = state.get("numbered"), state.get("committed")
        age = (state.get("epoch"), state.get("sequence"))
        if checkpoint_batch > numbered or age < (checkpoint_epoch, checkpoint_sequence):
            refuse("behind", {"checkpoint": checkpoint_batch, "numbered": numbered, "epoch": age[0], "sequence": age[1]})
        if checkpoint_batch < committed:
            refuse("fork", {"checkpoint": checkpoint_batch, "committed": committed, "run": self.rules.run})
        self._commit(checkpoint_batch)
        incarnation = max(state.get("incarnation"), above) + 1
        state.meta["incarnation"] = incarnation
        state.lineage.append((incarnation, checkpoint_batch))
        state.meta["published"] = min(state.get("published"), checkpoint_batch)
        for number in [n for n, v in state.version_records.items() if not v["pub"]]:
            del state.version_records[number]  # its writer is fenced: it can never be published
        state.add("sequence", 1)
        state.log("events", {"event": "incarnation", "incarnation": incarnation, "checkpoint": checkpoint_batch})
        state.changed.update(("samples", "versions", "ready"))
        self._notify()
        return Incarnation(
            incarnation, state.meta["epoch"], state.get("numbered"), state.get("committed"), state.get("sequence"))

    async def number_batch(self, incarnation: int, batch: int) -> Numbering:
        """Fix the composition of batch k, or say why it has to wait. OutOfRange unless committed < k <= numbered + 1."""
        state = self.state
        self._fence(incarnation)
        numbered, committed = state.get("numbered"), state.get("committed")
        if not committed < batch <= numbered + 1:
            refuse("range", {"batch": batch, "committed": committed, "numbered": numbered})
        if batch > self.rules.steps:
            return Numbering(False, finished=True)
        if batch <= numbered:
            return self._numbered(batch)
        chosen, waiting = self._choose_pinned(batch) if self.rules.pinned else self._choose(batch)
        if waiting is None:
            self._number(batch, chosen)
        self._notify()
        if waiting is None:
            return self._numbered(batch)
        return Numbering(False, waiting, checkpoint_now=state.draw_refusal() == "bytes" and numbered > committed)

    def _numbered(self, batch: int) -> Numbering:
        record = self.state.batches.get(batch, {"q": 0, "t": 0})
        return Numbering(True, sequence=record["q"], numbered_ms=record["t"])

    def _choose_pinned(self, batch: int) -> tuple[list[tuple[int, int, int]], Waiting | None]:
        """Batch k is draws [(k-1)B, kB), all finished; a dropped one is missing."""
        state, per_batch = self.state, self.rules.groups_per_batch
        draws = range((batch - 1) * per_batch, batch * per_batch)
        missing = max(0, draws.stop - max(state.get("next_draw"), draws.start))
        live = [d for d in draws if d in state.groups]
        unfinished = [d for d in live if state.groups[d]["st"] == "open"]
        if missing or unfinished:
            return [], self._batch_waiting("unfinished", batch, unfinished, missing)
        return [(d, batch - 1 - state.groups[d]["p"], 0) for d in live], None

    def _choose(self, batch: int) -> tuple[list[tuple[int, int, int]], Waiting | None]:
        """The B complete groups with the oldest tokens, in draw order, unless another one would miss its bound by that."""
        state, rules = self.state, self.rules
        chosen: list[tuple[int, int, int]] = []  # draw, lag, mask below
        for draw in sorted(state.ready):
            group = state.groups[draw]
            oldest, newest = state.bounds(group)
            lag, least = batch - 1 - oldest, max(0, batch - 1 - rules.max_lag)
            if lag <= rules.max_lag:
                chosen.append((draw, lag, 0))
            elif rules.over_lag[group["e"]] == "mask" and newest >= least:
                chosen.append((draw, lag, least))
            else:
                state.drop(draw, "lag")
        chosen.sort(key=lambda c: (-c[1], c[0]))
        unfinished = state.unfinished()
        if len(chosen) < rules.groups_per_batch:
            missing = max(0, rules.groups_per_batch - len(chosen) - len(unfinished))
            return [], self._batch_waiting("unfinished", batch, unfinished, missing, rules.groups_per_batch - len(chosen))
        last = {d: batch + rules.max_lag - lag for d, lag, _ in chosen[rules.groups_per_batch:]}  # batch that may take it
        for draw in unfinished:
            if (oldest := state.oldest_granted(state.groups[draw])) is not None:
                last[draw] = oldest + rules.max_lag + 1
        last = {d: k for d, k in last.items() if k >= batch and rules.over_lag[state.groups[d]["e"]] == "wait"}
        if (late := self._too_late(batch, last, unfinished)) is not None:
            return [], late
        return sorted(chosen[:rules.groups_per_batch]), None

    def _too_late(self, batch: int, last: Mapping[int, int], unfinished: Sequence[int]) -> Waiting | None:
        """Groups that this batch leaves behind need room in a batch that may still take them: in the next n batches, n * B.
        When too many would be left, wait for the first of them that is unfinished."""
        for end in range(batch, batch + self.rules.max_lag + 1):
            left = [d for d, k in last.items() if k <= end]
            late = [d for d in unfinished if last.get(d, end + 1) <= end]
            if late and len(left) > (end - batch) * self.rules.groups_per_batch:
                waiting = self._batch_waiting("oldest", batch, late[:1], 0)
                return Waiting(waiting.why, {**waiting.facts, "last": end, "left": len(left)})
        return None

    def _batch_waiting(self, why: str, batch: int, unfinished: Sequence[int], missing: int, count: int = 0) -> Waiting:
        facts: dict[str, Any] = {
            "batch": batch, "unfinished": count or len(unfinished) + missing, "undrawn": missing,
            "of": self.rules.groups_per_batch}
        if unfinished:
            group = self.state.groups[unfinished[0]]
            index = next(i for i, s in enumerate(group["s"]) if s["st"] not in ("scored", "closed"))
            sample = group["s"][index]
            facts.update(draw=unfinished[0], index=index, state=sample["st"], worker=sample.get("w", ""),
                         scorer=sample.get("sw", ""))
        return Waiting(why, facts)

    def _number(self, batch: int, chosen: Sequence[tuple[int, int, int]]) -> None:
        state = self.state
        for draw, _, _ in chosen:
            group = state.groups[draw]
            state.move_group(group, "batched")
            group["k"] = batch
            state.ready.remove(draw)
        state.meta["numbered"] = batch
        state.batches[batch] = {
            "g": [[*c, state.groups[c[0]]["quiet"]] for c in chosen], "d": [list(d) for d in state.drops],
            "q": state.get("sequence"), "t": state.now_ms(), "n": state.get("next_draw"),
            "u": sorted(d for d, g in state.groups.items() if g["st"] != "batched")}
        state.drops = []
        state.meta["resampled"] = 0
        state.log("events", {"event": "batch", "batch": batch, "groups": len(chosen)})
        state.changed.update(("ready", "samples"))

    async def read_batch(self, batch: int) -> Composition:
        """The composition with its bodies. NotFound unless numbered and uncommitted."""
        state = self.state
        if (record := state.batches.get(batch)) is None:
            refuse("range", {"batch": batch, "committed": state.get("committed"), "numbered": state.get("numbered")})
        groups = []
        for draw, lag, mask, quiet in record["g"]:
            group = state.groups[draw]
            members = [
                Member(i, state.bodies[draw, i], s["c"], state.scores[draw, i], min(p[0] for p in s["sp"]),
                       max(p[0] for p in s["sp"]), s["tok"], s["gen"], s["sb"])
                for i, s in enumerate(group["s"]) if s["st"] == "scored"]
            groups.append(BatchedGroup(draw, group["e"], group["x"], group["n"], lag, mask, members, bool(quiet)))
        return Composition(
            batch, state.meta["epoch"], record["q"], groups, [(d, r) for d, r in record["d"]], record["t"], record["n"],
            record["u"])

    # --- hop 6

    async def commit(self, incarnation: int, through_batch: int) -> int:
        """Close the rows of all batches up to k and free their bodies. Idempotent."""
        self._fence(incarnation)
        state = self.state
        if through_batch > state.get("numbered"):
            refuse("range", {
                "batch": through_batch, "committed": state.get("committed"), "numbered": state.get("numbered")})
        self._commit(through_batch)
        self._notify()
        return state.get("committed")

    def _commit(self, through: int) -> None:
        state = self.state
        if through <= state.get("committed"):
            return
        for batch in range(state.get("committed") + 1, through + 1):
            record = state.batches.pop(batch, {"g": ()})  # none: known from the log alone, since the ledger was rebuilt
            for draw, *_ in record["g"]:
                state.move_group(state.groups[draw], "committed")
                state.free(draw)
        state.meta["committed"] = through
        state.log("events", {"event": "commit", "batch": through})
        state.changed.update(("samples", "ready"))

    # --- hop 5 and 7

    async def reserve_version(self, incarnation: int, step: int) -> int:
        """A publication number above all earlier ones."""
        self._fence(incarnation)
        self.state.add("version", 1)
        number = self.state.get("version")
        self.state.version_records[number] = {"step": step, "inc": incarnation, "key": "", "crc": 0, "pub": 0, "del": 0}
        return number

    async def publish_version(self, version: Version, next_step: int = 0) -> Published:
        """Make a reserved version known; with `next_step`, reserve the number of that step's version, too."""
        self._fence(version.incarnation)
        state = self.state
        record = state.version_records.get(version.number)
        if record is None or record["inc"] != version.incarnation or record["step"] != version.step:
            refuse("unreserved", {
                "number": version.number, "step": version.step, "incarnation": version.incarnation})
        if not record["pub"]:
            record.update(pub=1, key=version.manifest_key, crc=version.manifest_crc32c)
            state.meta["published"] = max(state.get("published"), version.step)
            state.log("events", {"event": "version", "number": version.number, "step": version.step})
            state.changed.update(("versions", "samples"))
        deletable, versions = self._deletable(), await self.versions()
        self._notify()
        return Published(deletable, versions, await self.reserve_version(version.incarnation, next_step) if next_step else 0)

    def _deletable(self) -> list[Version]:
        state, records = self.state, self.state.version_records
        needed = self._needed_step()
        newest = sorted((n for n, v in records.items() if state.valid(v)), reverse=True)[:self.rules.keep_versions]
        held = {number for (number, _), deadline in state.holds.items() if deadline > state.now_ms()}
        deletable = []
        for number, record in sorted(records.items()):
            if record["del"]:
                deletable.append(_version(number, record))
                del records[number]
            elif record["pub"] and number not in newest and number not in held and not (
                    state.valid(record) and record["step"] >= needed):
                deletable.append(_version(number, record))
                record["del"] = 1
        return deletable

    def _needed_step(self) -> float:
        """Versions of this step and above are named by open draws, or will be by the next one, of a pinned schedule."""
        if not self.rules.pinned:
            return float("inf")
        state = self.state
        steps = [state.groups[d]["p"] for d in state.unfinished()[:1]]
        steps.append(max(0, state.get("next_draw") // self.rules.groups_per_batch - self.rules.max_lag))
        return min(steps)

    async def hold_version(self, number: int, reader: str, ttl_ms: int) -> None:
        """Keep a version from deletion while it is read. NotFound when it is gone."""
        record = self.state.version_records.get(number)
        if record is None or not record["pub"] or record["del"]:
            refuse("no_version", {"number": number})
        self.state.holds[number, reader] = self.state.now_ms() + ttl_ms

    async def versions(self) -> list[Version]:
        """Versions that may be loaded, newest first."""
        records = sorted(self.state.version_records.items(), reverse=True)
        return [_version(n, v) for n, v in records if self.state.valid(v)]

    # --- upkeep

    async def sweep(self) -> None:
        """Drop groups and close samples that are over their deadline; forget lapsed holds."""
        state, now = self.state, self.state.now_ms()
        group_ms, sample_ms = self.rules.group_timeout_ms, self.rules.sample_timeout_ms
        for draw in state.unfinished() if group_ms or sample_ms else ():
            group = state.groups[draw]
            if group_ms and group["t"] + group_ms <= now:
                state.drop(draw, "timeout")
                continue
            for index, sample in enumerate(group["s"]):
                if sample_ms and "t" in sample and sample["st"] not in TERMINAL and sample["t"] + sample_ms <= now:
                    state.fail((draw, index), sample, "timeout", "timeout")
            state.settle(draw)
        state.holds = {k: t for k, t in state.holds.items() if t > now}
        self._notify()

    async def grace(self) -> None:
        """After an outage of the store or of this service, no lease expires for one lease period."""
        self.state.meta["grace"] = self._grace_end()

    def _grace_end(self) -> int:
        return self._state.now_ms() + max(self.rules.lease_ms, self.rules.scoring_lease_ms)

    async def rebuild(self, plan: Rebuilt) -> None:
        """Start over behind a lost ledger: a new epoch; batches known from the log are numbered, other draws are lost.

        Logs stay, and name the lost draws that are still known; versions that the store still has can be loaded.
        """
        state, size, lost = self.state, self.rules.group_size, len(plan.lost_draws)
        if state.get("epoch") != plan.seen_epoch:
            return  # another front was faster
        fresh, epoch = MemoryState(self.rules, state.now_ms), max(state.get("epoch"), plan.epoch) + 1
        fresh.meta = {
            k: v for k, v in state.meta.items()
            if k in ("schema", "estimate", "grace", "incarnation") or "." in k or k.startswith(("es:", "eg:"))}
        fresh.meta.update({
            "epoch": epoch, "published": -1, "numbered": plan.numbered, "committed": plan.committed,
            "next_draw": plan.next_draw, "lost": plan.next_draw - lost, "version": plan.version, "g:dropped": lost,
            "s:closed": lost * size, "x:ledger lost": lost,
            "sequence": max(state.get("sequence"), plan.sequence) + 1,
            "dropped": plan.next_draw - plan.numbered * self.rules.groups_per_batch})
        fresh.cursor, fresh.lineage = dict(plan.cursor), state.lineage
        fresh.logs, fresh.lines = state.logs, state.lines
        for v in plan.versions:
            fresh.version_records[v.number] = {
                "step": v.step, "inc": v.incarnation, "key": v.manifest_key, "crc": v.manifest_crc32c, "pub": 1, "del": 0}
        for draw in plan.lost_draws:
            fresh.log("dead", {"draw": draw, "reason": "ledger lost", "epoch": epoch - 1})
        fresh.log("events", {
            "event": "rebuilt", "epoch": epoch, "numbered": plan.numbered, "next_draw": plan.next_draw})
        self._state = fresh

    async def balance(self) -> Balance:
        meta: dict[str, Any] = dict(self.state.meta)
        meta.update(ready=len(self.state.ready))
        return balance_of(meta, self.rules)

    async def holders(self, leases: bool = True) -> Holders:
        """The balance and who holds leases."""
        state = self.state
        if not leases:
            return Holders(await self.balance(), state.low_water(), {}, {})
        samples = Counter(state.groups[draw]["s"][index].get("w", "?") for draw, index in state.leases)
        scoring = Counter(state.groups[draw]["s"][index].get("sw", "?") for draw, index in state.scoring)
        return Holders(await self.balance(), state.low_water(), samples, scoring)

    async def archive(self) -> list[dict[str, Any]]:
        """Lines of the event and dead-letter logs, oldest first, to be written elsewhere and then trimmed."""
        return [
            dict(line, log=name, id=str(number))
            for name in ("events", "dead") for number, line in self.state.logs[name].items()]

    async def trim(self, lines: Sequence[dict[str, Any]]) -> None:
        """Forget archived lines."""
        for line in lines:
            self.state.logs[line["log"]].pop(int(line["id"]), None)


def _version(number: int, record: Record) -> Version:
    return Version(number, record["step"], record["inc"], record["key"], record["crc"])
