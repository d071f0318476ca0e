"""Large bodies reach Redis beside their script, in one transaction with it: what the script does not take leaves nothing
behind, and what is there already is not overwritten. The model, which knows no such way, has to say the same."""

from __future__ import annotations

from typing import Any

import pytest

from services.buffer.ledger import Grant, Lease, Outcome, Submit
from services.buffer.redis_ledger import RedisLedger, connect
from slipstream.errors import SlipstreamError, Unavailable
from tests.contract.ledger_bench import Bench, finish, grant, submit

A, B = Outcome.ACCEPTED, b"another body"


async def started(bench: Bench, **rules: Any) -> Any:
    """A ledger whose every body goes beside the script."""
    ledger = await bench.start(**rules)
    if isinstance(ledger, RedisLedger):
        ledger.beside_bytes = 1
    return ledger


async def bodies(bench: Bench, ledger: Any) -> dict[str, bytes]:
    """All bodies that it holds, whoever they belong to."""
    if not isinstance(ledger, RedisLedger):
        return {f"{draw}:{index}": body for (draw, index), body in ledger.state.bodies.items()}
    return {name.decode(): body for name, body in (await bench.clients[-1].hgetall(ledger._scripts.keys["bodies"])).items()}


def whole(grant: Grant, body: bytes = b"body", **fields: Any) -> Submit:
    return submit(grant, body=body, transcript=b"", score=b"1", **fields)


async def test_a_repeat_changes_nothing_and_another_body_is_refused(bench: Bench) -> None:
    ledger = await started(bench)
    first, *others = await grant(ledger, 4)
    assert await ledger.submit_samples([whole(first)]) == [A]
    assert await ledger.submit_samples([whole(first), whole(first, B), *map(whole, others)]) == [A, Outcome.CONFLICT, A, A, A]
    assert await bodies(bench, ledger) == dict.fromkeys(("0:0", "0:1", "1:0", "1:1"), b"body")
    assert (await ledger.balance()).meta["bytes"] == 4 * 5


async def test_what_is_not_taken_leaves_nothing_behind(bench: Bench) -> None:
    """An older attempt, a lease that was never granted, one of another epoch, a failed group, and one that is committed."""
    ledger = await started(bench)
    grants = list(await grant(ledger, 4))
    bench.now += 2000
    again = list(await grant(ledger, 4))
    never, old = Lease(900, 0, 1), Lease(0, 0, 1, 0)
    strange = [Submit(lease, b"body", 1, 5, 3, [(0, 1)], score=b"1") for lease in (never, old)]
    assert await ledger.submit_samples([whole(grants[0]), *strange]) == [Outcome.FENCED, Outcome.UNKNOWN, Outcome.OUTDATED]
    assert await bodies(bench, ledger) == {}
    failures = [submit(g, body=b"", failure="away") for g in again[:2]]
    assert await ledger.submit_samples([*failures, *map(whole, again[:2])]) == [A, A, Outcome.OUTDATED, Outcome.OUTDATED]
    assert await bodies(bench, ledger) == {}
    await finish(ledger, [*again[2:], *await grant(ledger, 2)])
    assert (await ledger.number_batch(1, 1)).numbered
    await bench.publish(ledger, 1)
    await ledger.commit(1, 1)
    assert await ledger.submit_samples([whole(again[2])]) == [Outcome.OUTDATED]
    assert await bodies(bench, ledger) == {}


async def test_a_body_over_the_quota_is_asked_for_by_reference_and_not_kept(bench: Bench) -> None:
    ledger = await started(bench, groups_per_batch=1, quota_bytes=700)
    grants = list(await grant(ledger, 4))
    outcomes = await ledger.submit_samples([whole(g, b"x" * 300, bounded=True) for g in grants])
    assert outcomes == [A, A, Outcome.SPILL, Outcome.SPILL]
    assert len(await bodies(bench, ledger)) == 2
    assert (await ledger.balance()).meta["bytes"] == 602


async def test_two_attempts_in_one_call_do_not_take_each_others_body(bench: Bench) -> None:
    """As concurrent submits are joined: the older one comes first and is fenced, the newer one is stored with its own body."""
    ledger = await started(bench)
    older, *_ = await grant(ledger, 1)
    bench.now += 2000
    newer, *_ = await grant(ledger, 1)
    assert newer.lease == older.lease._replace(attempt=2)
    assert await ledger.submit_samples([whole(older, b"of the first"), whole(newer, B)]) == [Outcome.FENCED, A]
    assert await bodies(bench, ledger) == {"0:0": B}


async def test_samples_that_wait_for_a_score_keep_their_bodies(bench: Bench) -> None:
    """A late repeat by a fenced worker takes nothing from the attempt that was stored."""
    ledger = await started(bench)
    older, *_ = await grant(ledger, 1)
    bench.now += 2000
    newer, *_ = await grant(ledger, 1)
    assert await ledger.submit_samples([submit(newer, body=B)]) == [A]
    assert await ledger.submit_samples([submit(older, body=b"of the first")]) == [Outcome.FENCED]
    assert await bodies(bench, ledger) == {"0:0": B}


async def test_an_emptied_or_overtaken_ledger_keeps_nothing_of_a_refused_call(bench: Bench) -> None:
    """Nor does one whose script fails: a body that stayed would be taken for that of a later sample of the same name."""
    if bench.kind == "memory":
        return  # the model has no way beside its scripts
    ledger = await started(bench)
    grants = list(await grant(ledger, 2))
    admin, key = connect(bench.admin_url), ledger._scripts.keys["bodies"]
    meta = await admin.hgetall(ledger._scripts.keys["meta"])
    await admin.hset(ledger._scripts.keys["meta"], "schema", 99)
    with pytest.raises(Unavailable, match="schema 99"):
        await ledger.submit_samples([whole(grants[0])])
    assert await admin.hgetall(key) == {}
    await admin.hset(ledger._scripts.keys["meta"], mapping={**meta})
    await admin.hset(ledger._scripts.keys["groups"], "0", b"damaged")
    await admin.hset(key, "0:1", b"of somebody")
    with pytest.raises(SlipstreamError) as failed:
        await ledger.submit_samples([whole(grants[0]), whole(grants[1])])
    assert failed.value.reason == "REDIS_SCRIPT"
    assert await admin.hgetall(key) == {b"0:1": b"of somebody"}
    await admin.flushall()
    with pytest.raises(Unavailable) as emptied:
        await ledger.submit_samples([whole(grants[0])])
    assert emptied.value.reason == "LEDGER_EMPTY"
    assert await admin.hgetall(key) == {}
    await admin.aclose()


async def test_a_server_without_room_takes_nothing(bench: Bench) -> None:
    """Redis refuses the body, so the script does not run either; the call can be repeated once there is room."""
    if bench.kind == "memory":
        return  # the model has no server
    ledger = await started(bench)
    grants = list(await grant(ledger, 2))
    admin = connect(bench.admin_url)
    await admin.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable) as full:
            await ledger.submit_samples([whole(g) for g in grants])
    finally:
        await admin.config_set("maxmemory", 0)
    assert full.value.reason == "REDIS_FULL"
    assert await bodies(bench, ledger) == {}
    assert await ledger.submit_samples([whole(g) for g in grants]) == [A, A]
    assert await bodies(bench, ledger) == {"0:0": b"body", "0:1": b"body"}
    await admin.aclose()
