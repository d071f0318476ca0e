"""What an acknowledgement is worth when the machine dies: everything under `always`, not everything under `everysec`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path

import pytest
from google.rpc import code_pb2

from services.buffer.redis_ledger import RedisLedger
from slipstream.errors import Unavailable
from slipstream.protos.buffer.v1 import samples_pb2
from tests.buffer_client import Client, buffer, finished, run_file
from tests.durability.power import Machine, build_shim, machine
from tests.redis_server import SERVERS, Server

pytestmark = pytest.mark.slow

SEED, WORKERS = 20260, 8
_SMALL = run_file(groups_per_batch=10, max_lag=500)
RUN = _SMALL.model_copy(update={"run": _SMALL.run.model_copy(update={"steps": 1000})})  # more than will be drawn


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


class Told:
    """What the buffer acknowledged: leases given and samples taken; and what it numbered."""

    def __init__(self) -> None:
        self.leases: dict[tuple[int, int], samples_pb2.SampleLease] = {}
        self.samples: dict[tuple[int, int], samples_pb2.SubmittedSample] = {}
        self.batches: dict[int, list[int]] = {}
        self.enough = threading.Event()  # of samples, since the server was started
        self.wanted = 0


async def work(client: Client, told: Told) -> None:
    """A rollout worker until Redis is gone: lease two, submit them one by one, and remember only what was answered."""
    with contextlib.suppress(Unavailable):
        while leases := (await client.lease(2, wait_s=0)).leases:
            told.leases |= {key(lease): lease for lease in leases}
            for lease in leases:
                submit = finished(lease)
                results = (await client.submit(submit)).results
                if results[0].outcome == samples_pb2.OUTCOME_ACCEPTED:
                    told.samples[key(lease)] = submit
                    if len(told.samples) > told.wanted:
                        told.enough.set()


async def train(client: Client, told: Told) -> None:
    """Score what there is and number batches, until Redis is gone."""
    with contextlib.suppress(Unavailable):
        while True:
            await client.score_all()
            batch = len(told.batches) + 1
            if (answer := await client.batch(batch, wait_s=0.05)).HasField("batch"):
                told.batches[batch] = [group.draw.number for group in answer.batch.groups]


def key(lease: samples_pb2.SampleLease) -> tuple[int, int]:
    return lease.lease.sample.draw.number, lease.lease.sample.index


def ledger_of(client: Client) -> RedisLedger:
    assert client.front is not None and isinstance(client.front.ledger, RedisLedger)
    return client.front.ledger


async def until_the_power_fails(here: Machine, folder: Path, told: Told, delay_s: float, beside: bool = False) -> int:
    """Run everything at once, and cut the power after `delay_s` and twenty samples; bytes that were not on the disk. Bodies
    go to Redis as large ones do when `beside`: in one transaction with their script."""
    lost: list[int] = []
    told.enough.clear()
    told.wanted = len(told.samples) + 20

    def cut() -> None:
        told.enough.wait(30)
        lost.append(here.lose_power())

    timer = threading.Timer(delay_s, cut)
    async with buffer(here.redis, folder, RUN) as client:
        ledger_of(client).beside_bytes = 1 if beside else 1 << 30
        if not told.leases:
            await client.begin()
        client.incarnation = 1
        timer.start()
        await asyncio.gather(train(client, told), *(work(client, told) for _ in range(WORKERS)))
    timer.join()
    return lost[0]


async def missing(here: Machine, folder: Path, told: Told) -> list[str]:
    """What was acknowledged and is not there. A sample is there when another body for it is a conflict."""
    gone = []
    async with buffer(here.redis, folder, RUN) as client:
        ledger = ledger_of(client)
        balance = await ledger.balance()
        bodies = await ledger._scripts.client.hlen(ledger._scripts.keys["bodies"])
        assert bodies == sum(balance.samples.get(state, 0) for state in ("unscored", "scoring", "scored"))
        numbered = int(balance.meta.get("numbered", 0))
        for batch, draws in told.batches.items():
            if batch > numbered or [g.draw for g in (await ledger.read_batch(batch)).groups] != draws:
                gone.append(f"batch {batch}")
        others = [another_body(submit) for submit in told.samples.values()]
        results = (await client.submit(*others)).results
        gone += [f"sample {k}" for k, r in zip(told.samples, results, strict=True) if r.status.code != code_pb2.ALREADY_EXISTS]
        held = [finished(lease) for k, lease in told.leases.items() if k not in told.samples]
        results = (await client.submit(*held)).results if held else []
        gone += [f"lease {s.lease.sample}" for s, r in zip(held, results, strict=True) if r.status.code != code_pb2.OK]
        (await ledger.balance()).check(2)
    return gone


def another_body(submit: samples_pb2.SubmittedSample) -> samples_pb2.SubmittedSample:
    """The same lease with a body that it never had."""
    lease = samples_pb2.SampleLease()
    lease.lease.CopyFrom(submit.lease)
    lease.lease.sample.draw.number += 1_000_000
    other = finished(lease)
    other.lease.CopyFrom(submit.lease)
    return other


@pytest.mark.parametrize("server", [s for s in SERVERS.values() if s.binary and not s.acl], ids=lambda s: s.name)
async def test_always_keeps_everything_acknowledged(server: Server, shim: Path, tmp_path: Path) -> None:
    """Leases, samples and batches that were answered are there after a power cut at a random moment, again and again."""
    chance, told = random.Random(SEED), Told()
    with machine(tmp_path, shim, "always", server) as here:
        for turn in range(4):
            before = len(told.samples)
            await until_the_power_fails(here, tmp_path / "objects", told, chance.uniform(0.15, 0.5), beside=turn % 2 == 0)
            here.redis.start()
            assert len(told.samples) > before + 20
            assert await missing(here, tmp_path / "objects", told) == []
        assert told.batches


async def test_everysec_loses_something_acknowledged(shim: Path, tmp_path: Path) -> None:
    """The same cut under `everysec`: this is what the mode gives up, and what shows that this test can fail."""
    told = Told()
    with machine(tmp_path, shim, "everysec") as here:
        lost = await until_the_power_fails(here, tmp_path / "objects", told, 0.5)
        assert lost > 0
        here.redis.start()
        assert len(told.samples) > 20
        assert await missing(here, tmp_path / "objects", told)
