"""Why somebody has to wait, as a sentence: what is missing and who has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.buffer.ledger import Rules, Waiting


def lease_sentence(waiting: Waiting, rules: Rules) -> str:
    """Why no sample can be leased."""
    facts, per_batch = waiting.facts, rules.groups_per_batch
    others = f"{facts['leased']} samples are leased to others" if facts["leased"] else ""
    match waiting.why:
        case "first_version":
            sentence = "the first policy version: the trainer has not published one"
        case "drawn" if facts["numbered"] >= rules.steps:
            sentence = "nothing: every batch of the run is numbered"
        case "drawn":
            sentence = f"the end of the run: all {rules.steps * per_batch} draws are made"
        case "budget":
            sentence = (
                f"the policy version of step {facts['published'] + 1}: {facts['outstanding']} draws are outstanding, at most "
                f"(max_lag + 1) * groups_per_batch = {(rules.max_lag + 1) * per_batch} may be")
        case "version":
            step = max(0, facts["draw"] // per_batch - rules.max_lag)
            sentence = f"the policy version of step {step}: draw {facts['draw']} is pinned to it"
        case "bytes":
            sentence = f"a checkpoint: {facts['bytes']} of buffer.quota_bytes = {rules.quota_bytes} bytes are taken"
        case _:
            sentence = "a policy version that an open draw is pinned to"
    return "; ".join(filter(None, (sentence, others)))


def batch_sentence(waiting: Waiting) -> str:
    """Why a batch is not numbered. Example: "batch 7: 3 of 64 groups unfinished, oldest draw 401 leased by rollout-1"."""
    facts = waiting.facts
    if waiting.why == "oldest":
        if (last := facts["last"]) > facts["batch"]:
            return f"batch {facts['batch']}: {_holder(facts)}, one of {facts['left']} groups that batches to {last} must take"
        return f"batch {facts['batch']}: {_holder(facts)} would exceed max_lag if it missed this batch"
    undrawn = f", {facts['undrawn']} of them not drawn" if facts["undrawn"] else ""
    oldest = f", oldest {_holder(facts)}" if "draw" in facts else ""
    return f"batch {facts['batch']}: {facts['unfinished']} of {facts['of']} groups unfinished{undrawn}{oldest}"


def _holder(facts: Mapping[str, Any]) -> str:
    place = f"draw {facts['draw']}"
    match facts["state"]:
        case "leased":
            return f"{place} leased by {facts['worker']}"
        case "scoring":
            return f"{place} scored by {facts['scorer']}"
        case "unscored":
            return f"{place} waiting for a reward worker"
        case _:
            return f"{place} waiting for a rollout worker"
