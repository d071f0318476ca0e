"""The two state machines, as tables. No other edge exists: both ledgers check every change against them.

Sample: open → leased(a); leased(a) → leased(a+1) | partial | unscored | scored; partial → leased(a+1); unscored → scoring;
scoring → scored | unscored; any non-terminal → closed(reason).
Group: open → complete | short; complete | short → batched(k) | evaluated; batched → committed;
open | complete | short | batched → dropped(reason).
"""

from __future__ import annotations

SAMPLE_EDGES: dict[str, frozenset[str]] = {
    "open": frozenset({"leased", "closed"}),
    "leased": frozenset({"leased", "partial", "unscored", "scored", "closed"}),
    "partial": frozenset({"leased", "closed"}),
    "unscored": frozenset({"scoring", "closed"}),
    "scoring": frozenset({"scored", "unscored", "closed"}),
    "scored": frozenset(),
    "closed": frozenset(),
}
GROUP_EDGES: dict[str, frozenset[str]] = {
    "open": frozenset({"complete", "short", "dropped"}),
    "complete": frozenset({"batched", "evaluated", "dropped"}),
    "short": frozenset({"batched", "evaluated", "dropped"}),
    "batched": frozenset({"committed", "dropped"}),
    "evaluated": frozenset(),
    "committed": frozenset(),
    "dropped": frozenset(),
}


class RefusedTransition(Exception):
    """A bug: code asked for an edge that the table does not have."""


def check_sample(old: str, new: str) -> None:
    """Raise RefusedTransition unless a sample may go from `old` to `new`."""
    if new not in SAMPLE_EDGES[old]:
        raise RefusedTransition(f"a sample cannot go from {old} to {new}")


def check_group(old: str, new: str) -> None:
    """Raise RefusedTransition unless a group may go from `old` to `new`."""
    if new not in GROUP_EDGES[old]:
        raise RefusedTransition(f"a group cannot go from {old} to {new}")
