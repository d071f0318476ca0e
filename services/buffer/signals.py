"""What an autoscaler goes by, as plain functions of the ledger's balance. Gauges of the buffer carry them."""

from __future__ import annotations

from services.buffer.ledger import Balance, Rules


def wanted_samples(rules: Rules, balance: Balance) -> int:
    """Samples that may be in generation now: those in hand or waiting for a lease, and those the budget would still draw.

    It is the work of all rollout workers together, never more than (max_lag + 1) batches, so the number of workers is this over
    what one of them holds; an empty buffer asks for the most, a trainer that is paused, or behind, for none. It does not depend
    on how many workers there are, so following it does not swing. Before the first version the whole budget counts: workers
    load their engines while the trainer prepares it.
    """
    meta, batch = balance.meta, rules.groups_per_batch
    drawn = int(meta.get("next_draw", 0)) - int(balance.groups.get("dropped", 0))
    room = min((rules.max_lag + 1) * batch - int(meta["outstanding"]), rules.steps * batch - drawn)
    in_hand = sum(int(balance.samples.get(state, 0)) for state in ("open", "leased", "partial"))
    return in_hand + rules.group_size * max(0, room)
