"""Checkpoints over S3 on a bad day: every fault of the proxy at random, two servers' idea of S3, and a trainer that retries."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from s3_faults import EVERY, Plan, Request, fault_proxy, scripted, seeded
from s3_server import ministack_server, open_bucket, s3_server

from services.trainer.checkpoint import POINTER, Checkpoints, Header
from services.trainer.snapshot import Snapshot
from slipstream.errors import Conflict, Fenced, Unavailable
from slipstream.s3 import S3Store

pytestmark = pytest.mark.slow

ROWS = 300_000  # weights of more than a megabyte: no Content-MD5, so that only the reading back notices damage


@pytest.fixture(scope="module", params=["moto", "ministack"])
def server(request, tmp_path_factory):
    opened = s3_server() if request.param == "moto" else ministack_server(tmp_path_factory.mktemp("ministack"))
    with opened as url:
        yield request.param, url


def snapshot(step: int) -> Snapshot:
    return Snapshot(
        {"w": torch.full((ROWS,), float(step))}, {"w/exp_avg": torch.full((7,), step + 0.5)},
        {"0/torch": torch.tensor([step], dtype=torch.uint8)})


async def saved(checkpoints: Checkpoints, step: int, incarnation: int) -> Header:
    """As the trainer does: again while the store is unavailable."""
    while True:
        try:
            return await checkpoints.save(snapshot(step), step=step, incarnation=incarnation, ledger_sequence=step)
        except Unavailable:
            continue


async def found(store: S3Store) -> int:
    """The step that a new start resumes from, with everything of it compared."""
    checkpoints = Checkpoints(store, "faults", 2)
    await checkpoints.open()
    loaded = await checkpoints.load()
    assert loaded is not None
    step, contents = loaded[0].step, loaded[1]
    for part, expected in (("weights", "w"), ("optimizer", "w/exp_avg"), ("random", "0/torch")):
        assert torch.equal(getattr(contents, part)[expected], getattr(snapshot(step), part)[expected])
    return step


async def test_a_checkpoint_survives_every_fault_of_the_store(server):
    """Two requests in five fail, in every way there is. Whatever `save` acknowledged is what the next start finds, bit for
    bit; a second trainer takes over in the middle, and the first one is told."""
    kind, url = server
    seen: Counter[str] = Counter()
    for seed in range(2):
        async with fault_proxy(url, seed) as proxy, open_bucket(proxy.url) as store:
            proxy.plan = bad_day(seed, spare=kind == "moto")
            first, second = Checkpoints(store, "faults", 2), Checkpoints(store, "faults", 2)
            await first.open()
            await first.take_over(1)
            for step in (1, 2):
                await saved(first, step, 1)
                assert await found(store) == step
                await first.retain()
            await second.open()
            await second.take_over(2)
            with pytest.raises(Fenced, match="incarnation 2 has taken over from 1"):
                await saved(first, 3, 1)
            for step in (3, 4):
                await saved(second, step, 2)
                assert await found(store) == step
            proxy.plan = scripted()
            assert await found(store) == 4
            seen.update(fault for fault, _ in proxy.injected.elements())
    assert len(seen) >= len(EVERY) - 1 and sum(seen.values()) > 50, seen


def bad_day(seed: int, spare: bool) -> Plan:
    """Every fault, at random. `spare` the small writes from damage: moto does not compare Content-MD5 and would keep it."""
    random_faults = seeded(seed, 0.4, EVERY)

    def plan(request: Request) -> str:
        fault = random_faults(request)
        return "" if spare and fault == "damaged" and "safetensors" not in request.target else fault

    return plan


async def test_the_lost_reply_of_the_pointers_replacement(server):
    """The pointer was replaced, and no try got an answer: the checkpoint is written again, and this trainer's own pointer does
    not pass for a successor's. A pointer that somebody else moved is still a conflict."""
    _, url = server
    async with fault_proxy(url) as proxy, open_bucket(proxy.url) as store:
        checkpoints = Checkpoints(store, "faults", 2)
        await checkpoints.open()
        await checkpoints.take_over(1)
        left = ["lost"] + ["busy"] * 5
        proxy.plan = lambda request: (
            left.pop(0) if left and request.method == "PUT" and request.target.endswith(POINTER) else "")
        with pytest.raises(Unavailable):
            await checkpoints.save(snapshot(1), step=1, incarnation=1, ledger_sequence=1)
        assert await found(store) == 1, "it took effect"
        header = await checkpoints.save(snapshot(1), step=1, incarnation=1, ledger_sequence=1)
        assert checkpoints.pointer.name == header.name
        await checkpoints.save(snapshot(2), step=2, incarnation=1, ledger_sequence=2)
        assert await found(store) == 2
        late = Checkpoints(store, "faults", 2)
        await late.open()
        await checkpoints.save(snapshot(3), step=3, incarnation=1, ledger_sequence=3)
        with pytest.raises(Conflict):
            await late.take_over(2)
