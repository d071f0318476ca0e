"""What is true of a ledger in every state: counters, queues and held bytes follow from the records of the groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.buffer.memory_state import MemoryState

TERMINAL = ("scored", "closed")
HELD = {"lb": "bodies", "lt": "transcripts", "ls": "scores", "lp": "partials"}


def check_sums(state: MemoryState) -> None:
    """AssertionError naming what does not add up."""
    samples = {(d, i): s for d, g in state.groups.items() for i, s in enumerate(g["s"])}
    by_state = {
        st: {k for k, s in samples.items() if s["st"] == st} for st in ("open", "leased", "partial", "unscored", "scoring")}
    _equal("open queue", state.open_samples, by_state["open"] | by_state["partial"])
    _equal("leases", set(state.leases), by_state["leased"])
    _equal("scoring leases", set(state.scoring), by_state["scoring"])
    assert by_state["unscored"] <= set(state.unscored), "an unscored sample is not in the queue of the scorers"
    for st, keys in by_state.items():
        _equal(f"s:{st}", state.get("s:" + st), len(keys))
    groups = Counter(g["st"] for g in state.groups.values())
    for st in ("open", "complete", "short", "batched"):
        _equal(f"g:{st}", state.get("g:" + st), groups[st])
    assert set(groups) <= {"open", "complete", "short", "batched"}, "a terminal group has a record"
    _equal("ready", set(state.ready), {d for d, g in state.groups.items() if g["st"] in ("complete", "short")})
    _equal("batched", {d for b in state.batches.values() for d, *_ in b["g"]},
           {d for d, g in state.groups.items() if g["st"] == "batched"})
    _check_bytes(state, samples)
    _equal("dropped", state.get("g:dropped"), sum(v for k, v in state.meta.items() if k.startswith("x:")))
    _equal("draws with an end", state.get("g:committed") + state.get("g:dropped"),
           state.get("next_draw") - state.get("lost") - len(state.groups))
    assert all(state.low_water() <= d < state.get("next_draw") for d in state.groups)
    assert state.get("committed") <= state.get("numbered") and state.get("published") <= state.get("numbered")


def _check_bytes(state: MemoryState, samples: dict[tuple[int, int], Any]) -> None:
    tables = {field: getattr(state, name) for field, name in HELD.items()}
    for field, table in tables.items():
        sizes = {k: s[field] for k, s in samples.items() if field in s}
        _equal(f"parts held as {field}", {k: len(v) for k, v in table.items() if v}, sizes)
    _equal("bytes", state.get("bytes"), sum(len(v) for table in tables.values() for v in table.values()))
    _equal("reserved", state.get("reserved"), sum(s.get("r", 0) for s in samples.values()))
    roomless = [k for k, s in samples.items() if s["st"] in ("open", "leased", "partial") and "r" not in s]
    _equal("unfinished samples without room", roomless, [])


def _equal(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: {found}, but the records say {expected}"
