"""State of the in-memory ledger and the steps that several transitions share: the Python twin of scripts/ledger.lua.

A group record (JSON in Redis, a dict here):
    {"e": environment, "x": task index, "n": samples, "t": drawn at (ms), "m": least step, "p": pinned step or -1,
     "q": how often the task was requeued, "quiet": 1 when it is finished and all rewards are equal, "st": state,
     "k": batch (0 = none), "s": [sample, ...]}
A sample record; absent keys mean "not yet":
    st state · a attempt · w worker · g [step, incarnation] that the grant started from · r bytes reserved ·
    t first grant (ms) · sa scoring attempt · sw scoring worker · c crc32c ·
    tok, gen tokens · sp [[step, incarnation], ...] of the body · pp the same of a partial · rw reward ·
    lb, lt, ls, lp bytes held as body, transcript, score, partial · sb bytes of a body in the object store (its key is held) ·
    why reason of closing
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.buffer import transitions
from services.buffer.ledger import Lease, Rules

Record = dict[str, Any]
Key = tuple[int, int]  # (draw, sample index)
TERMINAL = ("scored", "closed")
REQUEUED = ("failed", "timeout", "lag")  # reasons of a drop after which the same task is worth another draw


class MemoryState:
    """Tables and shared steps. `now_ms` is the injected clock."""

    def __init__(self, rules: Rules, now_ms: Callable[[], int]) -> None:
        self.rules, self.now_ms = rules, now_ms
        self.meta: dict[str, Any] = {}
        self.groups: dict[int, Record] = {}
        self.open_samples: set[Key] = set()
        self.leases: dict[Key, int] = {}  # deadline, ms
        self.scoring: dict[Key, int] = {}
        self.bodies: dict[Key, bytes] = {}
        self.transcripts: dict[Key, bytes] = {}
        self.scores: dict[Key, bytes] = {}
        self.partials: dict[Key, bytes] = {}
        self.unscored: list[Key] = []
        self.ready: list[int] = []
        self.logs: dict[str, dict[int, Record]] = {"events": {}, "dead": {}}  # lines by a number that only grows
        self.lines = 0
        self.drops: list[tuple[int, str]] = []
        self.batches: dict[int, Record] = {}
        self.version_records: dict[int, Record] = {}
        self.holds: dict[tuple[int, str], int] = {}
        self.cursor: dict[str, int] = {}
        self.lineage: list[tuple[int, int]] = []  # (incarnation, checkpoint batch that it started from)
        self.changed: set[str] = set()

    def get(self, name: str) -> int:
        return self.meta.get(name, 0)

    def add(self, name: str, delta: int) -> None:
        self.meta[name] = self.get(name) + delta

    def log(self, name: str, line: Record) -> None:
        """Append to `events` or to the dead letters, `dead`."""
        self.lines += 1
        self.logs[name][self.lines] = line

    # --- the state machines

    def move(self, sample: Record, state: str) -> None:
        """A sample's edge, counted."""
        transitions.check_sample(sample["st"], state)
        self.add("s:" + sample["st"], -1)
        self.add("s:" + state, 1)
        self.add("sequence", 1)
        if self.rules.edges:
            self.add(f"es:{sample['st']}>{state}", 1)
        sample["st"] = state

    def move_group(self, group: Record, state: str) -> None:
        """A group's edge, counted."""
        transitions.check_group(group["st"], state)
        self.add("g:" + group["st"], -1)
        self.add("g:" + state, 1)
        self.add("sequence", 1)
        if self.rules.edges:
            self.add(f"eg:{group['st']}>{state}", 1)
        group["st"] = state

    def hold(self, sample: Record, field: str, size: int) -> None:
        """Bytes held for one part of a sample (lb, lt, ls, lp)."""
        self.add("bytes", size - sample.get(field, 0))
        if size:
            sample[field] = size
        else:
            sample.pop(field, None)

    def unreserve(self, sample: Record) -> None:
        """Give the admission estimate of a sample back."""
        self.add("reserved", -sample.pop("r", 0))

    def close(self, key: Key, sample: Record, reason: str) -> None:
        """Any non-terminal state → closed(reason); frees what it holds."""
        self.open_samples.discard(key)
        self.leases.pop(key, None)
        self.scoring.pop(key, None)
        self.unreserve(sample)
        self._free_parts(key, sample)
        self.move(sample, "closed")
        sample["why"] = reason

    def fail(self, key: Key, sample: Record, reason: str, why: str = "failed") -> None:
        """Close a sample for good, by name in the dead letters. `settle` has to follow."""
        self.close(key, sample, why)
        self.log("dead", {"draw": key[0], "index": key[1], "reason": reason})

    def settle(self, draw: int) -> None:
        """Group open → complete | short | dropped(failed | timeout | no_signal) once every sample is scored or closed."""
        group = self.groups.get(draw)
        if group is None or group["st"] != "open" or any(s["st"] not in TERMINAL for s in group["s"]):
            return
        states = [s["st"] for s in group["s"]]
        if "scored" not in states:
            self.drop(draw, "timeout" if any(s["why"] == "timeout" for s in group["s"]) else "failed")
            return
        self.move_group(group, "short" if "closed" in states else "complete")
        group["quiet"] = int(len({s["rw"] for s in group["s"] if s["st"] == "scored"}) < 2)
        if group["quiet"] and self.get("resampled") < self.rules.resample_no_signal:
            self.add("resampled", 1)
            self.drop(draw, "no_signal")
            return
        self.ready.append(draw)
        if self.rules.pinned or len(self.ready) >= self.rules.groups_per_batch:
            self.changed.add("ready")

    def drop(self, draw: int, reason: str) -> None:
        """Group → dropped(reason): its samples are closed, its slot and bytes are free, the decision is written down.

        Its task may be drawn again at once, in the slot that it leaves: dropped(requeued as d').
        """
        group, line = self.groups[draw], {}
        for index, sample in enumerate(group["s"]):
            if sample["st"] not in TERMINAL:
                self.close((draw, index), sample, reason)
        tokens = sum(s.get("gen", 0) for s in group["s"])
        self.move_group(group, "dropped")
        self.free(draw)
        self.add("dropped", 1)
        if draw in self.ready:
            self.ready.remove(draw)
        if reason in REQUEUED and group["q"] < self.rules.max_requeues and self.get("numbered") < self.rules.steps:
            again = self.make_draw(group["e"], group["x"], group["q"] + 1)
            line, reason = {"cause": reason}, f"requeued as {again}"
            self.add("x:requeued", 1)
        else:
            self.add("x:" + reason, 1)
        self.drops.append((draw, reason))
        self.log("dead", {"draw": draw, "reason": reason, "environment": group["e"], "generated_tokens": tokens, **line})
        self.changed.update(("samples", "ready"))

    def make_draw(self, environment: str, index: int, requeues: int = 0) -> int:
        """Open a group: reserves budget and bytes. Its samples wait in `open_samples`."""
        rules, draw, out = self.rules, self.get("next_draw"), self.outstanding()
        pinned = max(0, draw // rules.groups_per_batch - rules.max_lag) if rules.pinned else -1
        least = max(0, max(self.get("published"), 0) + out // rules.groups_per_batch - rules.max_lag)
        estimate = self.get("estimate")
        self.groups[draw] = {
            "e": environment, "x": index, "n": rules.group_size, "t": self.now_ms(), "m": least if pinned < 0 else pinned,
            "p": pinned, "q": requeues, "quiet": 0, "st": "open", "k": 0,
            "s": [{"st": "open", "a": 0, "sa": 0, "r": estimate} for _ in range(rules.group_size)]}
        self.open_samples.update((draw, i) for i in range(rules.group_size))
        for name, delta in (
                ("next_draw", 1), ("g:open", 1), ("s:open", rules.group_size), ("sequence", 1),
                ("reserved", rules.group_size * estimate)):
            self.add(name, delta)
        return draw

    def free(self, draw: int) -> None:
        """Forget a terminal group: below the next draw and without a record means terminal."""
        group = self.groups.pop(draw)
        for index, sample in enumerate(group["s"]):
            self._free_parts((draw, index), sample)

    def _free_parts(self, key: Key, sample: Record) -> None:
        for field, table in (("lb", self.bodies), ("lt", self.transcripts), ("ls", self.scores), ("lp", self.partials)):
            table.pop(key, None)
            self.hold(sample, field, 0)

    # --- lookups

    def find(self, lease: Lease) -> Record | None:
        """The sample of a lease; None when its group is terminal, or was never drawn, or nobody was granted it: attempt 0."""
        group = self.groups.get(lease.draw) if lease.epoch == self.meta["epoch"] and lease.attempt > 0 else None
        return group["s"][lease.sample] if group and lease.sample < group["n"] else None

    def is_past(self, lease: Lease) -> bool:
        """Whether a lease without a record names a terminal draw (else: one that never was)."""
        return lease.attempt > 0 and (lease.epoch < self.meta["epoch"] or (
            lease.epoch == self.meta["epoch"] and lease.draw < self.get("next_draw") and lease.draw not in self.groups))

    def effective(self, step: int, incarnation: int) -> int:
        """A step as lag counts it: on a branch that died with a crash, the distance through the common checkpoint."""
        fork = min((c for i, c in self.lineage if i > incarnation), default=None)
        return step if fork is None or step <= fork else 2 * fork - step

    def valid(self, version: Record) -> bool:
        """Published, on the living branch, not handed out for deletion."""
        return bool(
            version["pub"] and not version["del"] and self.effective(version["step"], version["inc"]) == version["step"])

    def bounds(self, group: Record) -> tuple[int, int]:
        """Lowest and highest effective step of the tokens of a finished group."""
        steps = [self.effective(*pair) for s in group["s"] if s["st"] == "scored" for pair in s["sp"]]
        return min(steps), max(steps)

    def oldest_granted(self, group: Record) -> int | None:
        """Lowest effective step that a token of an unfinished group may have; None when nothing was granted."""
        pairs: list[Sequence[int]] = []
        for sample in group["s"]:
            if sample["st"] in ("leased", "partial"):
                pairs += [sample["g"], *sample.get("pp", ())]
            elif sample["st"] in ("unscored", "scoring", "scored"):
                pairs += sample["sp"]
        return min((self.effective(step, incarnation) for step, incarnation in pairs), default=None)

    def least_step(self, group: Record) -> int:
        """Step that a worker must have loaded for a grant made now.

        Not more than what the trainer will publish without this group: after a restart from an older checkpoint and with
        another `publish_every`, the step that was current when the group was drawn may never come again.
        """
        if group["p"] >= 0:
            return group["p"]
        numbered, every = self.get("numbered"), self.rules.publish_every
        to_come = max(self.get("published"), numbered // every * every)
        return max(min(group["m"], to_come), numbered - self.rules.max_lag)

    def pinned_version(self, step: int) -> int | None:
        """Newest valid version of a step."""
        return max((n for n, v in self.version_records.items() if v["step"] == step and self.valid(v)), default=None)

    # --- budget

    def outstanding(self) -> int:
        """Draws open, complete, or batched and not yet covered by a published step."""
        trained = min(max(self.get("published"), 0), self.get("numbered"))
        return self.get("next_draw") - self.get("dropped") - self.rules.groups_per_batch * trained

    def draw_refusal(self) -> str | None:
        """Why no draw may be made now; None when it may. Names are those of sentences.py."""
        rules, draw, per_batch = self.rules, self.get("next_draw"), self.rules.groups_per_batch
        if self.get("published") < 0:
            return "first_version"
        if (draw if rules.pinned else draw - self.get("dropped")) >= rules.steps * per_batch:
            return "drawn"
        if rules.pinned and self.get("published") < max(0, draw // per_batch - rules.max_lag):
            return "version"
        if not rules.pinned and self.outstanding() >= (rules.max_lag + 1) * per_batch:
            return "budget"
        needed = self.get("bytes") + self.get("reserved") + rules.group_size * self.get("estimate")
        freeable = self.get("numbered") > self.get("committed") or self.get("g:open") > 0
        return "bytes" if needed > rules.quota_bytes and freeable else None

    def unfinished(self) -> list[int]:
        """Draws of open groups, oldest first."""
        return sorted(d for d, g in self.groups.items() if g["st"] == "open")

    def low_water(self) -> int:
        """Every draw below is terminal; above, those without a record are."""
        return min(self.groups, default=self.get("next_draw"))

    def cursor_position(self) -> int:
        """How many tasks the draws have taken from the cursor: a requeued task is drawn again without it."""
        return self.get("next_draw") - self.get("x:requeued")

    def contents(self) -> Mapping[str, Any]:
        """Everything, for comparison with another implementation."""
        return {
            "meta": {k: v for k, v in self.meta.items() if v}, "groups": self.groups, "open": sorted(self.open_samples),
            "leases": self.leases, "scoring": self.scoring, "bodies": self.bodies, "transcripts": self.transcripts,
            "scores": self.scores, "partials": self.partials, "unscored": self.unscored, "ready": self.ready,
            **{name: list(lines.values()) for name, lines in self.logs.items()}, "drops": self.drops, "batches": self.batches,
            "versions": self.version_records, "holds": self.holds, "cursor": {k: v for k, v in self.cursor.items() if v},
            "lineage": self.lineage, "unfinished": self.unfinished()}
