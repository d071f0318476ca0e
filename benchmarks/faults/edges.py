"""Which edges of the state machines a chaos run must have taken, and which it cannot take, with the reason.

Counted by the ledger (service.audit), edge by edge: a run that never was in a state has not shown that it survives there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.buffer.transitions import GROUP_EDGES, SAMPLE_EDGES

Edge = tuple[str, str, str]  # machine, from, to

_PARTIAL = "only an orderly drain that cuts a long answer hands a partial in; kills and stops never do"
_EVALUATED = "evaluation draws do not exist yet"
_NO_DEADLINE = "a pinned schedule has no deadlines: what is lost is granted again until it is done"

EXEMPT: dict[Edge, str] = {
    ("sample", "leased", "partial"): _PARTIAL,
    ("sample", "partial", "leased"): _PARTIAL,
    ("sample", "partial", "closed"): _PARTIAL,
    ("group", "complete", "evaluated"): _EVALUATED,
    ("group", "short", "evaluated"): _EVALUATED,
    ("group", "batched", "dropped"): "no fault undoes a numbered batch: its composition is durable and served again unchanged",
}
EXEMPT_PINNED: dict[Edge, str] = EXEMPT | {
    ("sample", "open", "closed"): _NO_DEADLINE,
    ("sample", "unscored", "closed"): _NO_DEADLINE,
    ("sample", "scoring", "closed"): _NO_DEADLINE,
    ("group", "complete", "dropped"): "a pinned batch is its draws: no group is too old for it",
    ("group", "short", "dropped"): "a pinned batch is its draws: no group is too old for it",
}


def exempt(pinned: bool) -> Mapping[Edge, str]:
    """Edges that faults cannot reach, with the reason."""
    return EXEMPT_PINNED if pinned else EXEMPT


def counted(meta: Mapping[str, Any]) -> dict[Edge, int]:
    """How often each edge was taken, from the ledger's counters `es:old>new` and `eg:old>new`; edges never taken are 0."""
    edges: dict[Edge, int] = {}
    for machine, prefix, table in (("sample", "es:", SAMPLE_EDGES), ("group", "eg:", GROUP_EDGES)):
        for old, news in table.items():
            for new in sorted(news):
                edges[machine, old, new] = int(meta.get(f"{prefix}{old}>{new}", 0))
    return edges
