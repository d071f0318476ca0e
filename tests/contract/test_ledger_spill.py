"""Large bodies: a ledger over its quota takes keys in place of bodies and refuses nobody; answers fit a message."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from services.buffer.ledger import Grant, Outcome, Partial, Submit
from tests.contract.ledger_bench import Bench, grant, submit

KEY = b"spill/1-1-0-1-0000ffff"


def large(grant: Grant, **fields: Any) -> Submit:
    return submit(grant, body=b"x" * 300, transcript=b"", score=b"1", bounded=True, **fields)


def by_reference(submitted: Submit) -> Submit:
    return dataclasses.replace(submitted, body=KEY, bounded=False, spilled=300)


async def test_a_body_over_the_quota_is_asked_for_by_reference(bench: Bench) -> None:
    """The sample stays leased until it comes again with a key; bytes count keys, batches tell them from bodies."""
    ledger = await bench.start(groups_per_batch=1, quota_bytes=700)
    grants = list(await grant(ledger, 4))
    assert await ledger.submit_samples([large(g) for g in grants]) == [Outcome.ACCEPTED] * 2 + [Outcome.SPILL] * 2
    held = (await ledger.balance()).meta
    assert held["bytes"] == 602 and (await ledger.balance()).samples["leased"] == 2
    assert await ledger.submit_samples([by_reference(large(g)) for g in grants[2:]]) == [Outcome.ACCEPTED] * 2
    assert (await ledger.balance()).meta["bytes"] == 602 + 2 * (len(KEY) + 1)
    assert await ledger.submit_samples([large(g) for g in grants]) == [Outcome.ACCEPTED] * 4  # repeats: nothing is asked for
    for k in (1, 2):
        assert (await ledger.number_batch(1, k)).numbered
        await bench.publish(ledger, k)
    first, second = [(await ledger.read_batch(k)).groups[0].members for k in (1, 2)]
    assert [(m.spilled, m.body) for m in first] == [(0, b"x" * 300)] * 2
    assert [(m.spilled, m.body) for m in second] == [(300, KEY)] * 2
    await ledger.commit(1, 2)
    assert (await ledger.balance()).meta["bytes"] == 0
    (await ledger.balance()).check(2)


async def test_what_a_draw_reserves_is_learnt_from_the_bodies_themselves(bench: Bench) -> None:
    """A key is short, but the next body of its size is not."""
    ledger = await bench.start(groups_per_batch=1, quota_bytes=700)
    before = (await ledger.balance()).meta["estimate"]
    await ledger.submit_samples([by_reference(large(g)) for g in await grant(ledger, 2)])
    assert (await ledger.balance()).meta["estimate"] > before


async def test_partials_of_one_answer_fit_a_message(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large partials are granted a few at a time: an answer that cannot be sent would lapse, and come again, for ever."""
    for module in ("memory_ledger", "redis_ledger"):
        monkeypatch.setattr(f"services.buffer.{module}.PARTIAL_BYTES", 250)
    ledger = await bench.start()
    await ledger.submit_partials([Partial(g.lease, b"p" * 100, [(0, 1)], release=True) for g in await grant(ledger, 5)])
    assert [len(g.partial) for g in await grant(ledger)] == [100, 100, 100]
    assert [len(g.partial) for g in await grant(ledger)] == [100, 100, 0, 0, 0]


async def test_a_failed_sample_gives_the_bytes_of_its_partial_back(bench: Bench) -> None:
    """At once, though its group goes on."""
    ledger = await bench.start()
    one, other = await grant(ledger, 2)
    await ledger.submit_partials([Partial(g.lease, b"p" * 100, [(0, 1)]) for g in (one, other)])
    await ledger.submit_samples([submit(one, failure="the environment went away")])
    balance = await ledger.balance()
    assert balance.meta["bytes"] == 100 and balance.groups["open"] == 1
