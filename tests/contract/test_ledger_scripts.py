"""The server holds one script, whatever is called: what its Lua keeps is what each of its garbage collections goes through."""

from __future__ import annotations

from services.buffer.redis_ledger import RedisLedger
from tests.contract.ledger_bench import Bench, finish, grant, submit


async def test_all_calls_are_one_script(bench: Bench) -> None:
    """But for that of large bodies, which goes with each call and is short therefore; and after a flush, as after a failover,
    the next call brings it again."""
    ledger = await bench.start()
    if not isinstance(ledger, RedisLedger):
        return
    direct = bench.clients[-1]
    await direct.script_flush()  # other tests' remain
    await finish(ledger, await grant(ledger, 4))
    assert (await ledger.number_batch(1, 1)).numbered and len((await ledger.read_batch(1)).groups) == 2
    assert (await direct.info("memory"))["number_of_cached_scripts"] == 1
    whole, sha = ledger._scripts._text()
    alone, _ = ledger._scripts._text("submit_samples")
    assert len(alone) < len(whole) * 0.7 and await direct.script_exists(sha) == [True]
    ledger.beside_bytes = 1
    assert await ledger.submit_samples([submit(g) for g in await grant(ledger, 1)])
    assert (await direct.info("memory"))["number_of_cached_scripts"] == 2
    await direct.script_flush()
    await ledger.sweep()
    assert await direct.script_exists(sha) == [True]
