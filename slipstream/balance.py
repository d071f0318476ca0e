"""Does a ledger's balance add up? One answer for the buffer's gauge, `slipstream ledger` and tests."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.protos.buffer.v1 import ledger_pb2

BALANCE_KEY = "ledger/balance.json"  # the last balance that the buffer wrote: at each commit and when it drains


def complaints(balance: ledger_pb2.Balance) -> list[str]:
    """What does not add up, as sentences; empty when everything does.

    Example: "120 draws, but 119 groups: 56 committed, 63 open"
    """
    found = []
    draws = balance.draws - balance.lost_draws
    if (groups := sum(balance.groups.values())) != draws:
        found.append(f"{draws} draws, but {groups} groups: {counts(balance.groups)}")
    if (samples := sum(balance.samples.values())) != draws * balance.group_size:
        found.append(f"{draws} draws of {balance.group_size} samples, but {samples} samples: {counts(balance.samples)}")
    if (reasons := sum(balance.dropped.values())) != balance.groups["dropped"]:
        found.append(f"{balance.groups['dropped']} dropped groups, but {reasons} reasons: {counts(balance.dropped)}")
    for name, table in (("groups", balance.groups), ("samples", balance.samples)):
        found += [f"{count} {state} {name}" for state, count in sorted(table.items()) if count < 0]
    held = sum(balance.groups[state] for state in ("open", "complete", "short", "batched"))
    for name, size in (("held", balance.bytes), ("reserved", balance.reserved_bytes)):
        if size < 0 or (size and not held):
            found.append(f"{size} bytes {name} for {held} groups that are not over")
    for name, leases, state in (
            ("sample", balance.sample_leases, "leased"), ("scoring", balance.scoring_leases, "scoring")):
        if (sum(leases.values())) > balance.samples[state]:
            found.append(f"{sum(leases.values())} {name} leases for {balance.samples[state]} {state} samples")
    return found


def counts(table: Mapping[str, int]) -> str:
    """`56 committed, 63 open`; `none` when all are zero."""
    return ", ".join(f"{count} {name}" for name, count in sorted(table.items()) if count) or "none"
