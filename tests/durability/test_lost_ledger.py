"""Redis loses its data, or goes back in time: each case ends in a named and counted outcome, nothing is trained twice, and the
batch log stays what it was."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from slipstream import sample
from slipstream.batch_log import numbers, read_header
from slipstream.config import RunFile
from slipstream.errors import Fenced, Unavailable
from slipstream.objects import FileStore
from slipstream.protos.buffer.v1 import batches_pb2, samples_pb2
from slipstream.protos.types.v1 import policy_pb2
from tests.buffer_client import Client, buffer, finished, run_file
from tests.redis_server import RedisProcess, redis_process

ACCEPTED, OUTDATED = samples_pb2.OUTCOME_ACCEPTED, samples_pb2.OUTCOME_OUTDATED


class Scene:
    """One buffer front, and somebody who plays all workers. The batch log must never change: see `logged`."""

    def __init__(self, client: Client, redis: RedisProcess, folder: Path) -> None:
        self.client, self.redis, self.copy, self.store = client, redis, folder / "copy", FileStore(folder / "objects")
        self.logged: dict[int, batches_pb2.Batch] = {}
        assert client.front is not None
        self.ledger, self.metrics = client.front.ledger, client.front.metrics

    async def start(self, checkpoint: int = 0, above: int = 0) -> batches_pb2.TakeIncarnationResponse:
        """A trainer starts from a checkpoint, and publishes it."""
        deadline = time.monotonic() + 10
        while True:
            with contextlib.suppress(Unavailable):  # Redis has just come back
                taken = await self.client.take_incarnation(checkpoint_batch=checkpoint, above=above)
                break
            assert time.monotonic() < deadline
        await self.publish(checkpoint)
        return taken

    async def step(self, batch: int) -> list[int]:
        """Sample, number, publish: its draws, which no other batch of the log has."""
        await self.hand_in(list((await self.client.lease()).leases), batch - 1)
        composition = (await self.client.batch(batch)).batch
        await self.publish(batch)
        await self.check_log()
        return draws(composition)

    async def hand_in(self, leases: list[samples_pb2.SampleLease], step: int) -> list[int]:
        """Submit samples of the newest version, and score them; the outcomes."""
        submits = []
        for lease in leases:
            submit = finished(lease, step)
            played = sample.decode(submit.body)
            played.segments[0].spans = (sample.Span(step + 1, step, self.client.incarnation, 2),)
            submit.body = sample.encode(played)
            submit.crc32c = sample.crc32c(submit.body)
            submits.append(submit)
        outcomes = [result.outcome for result in (await self.client.submit(*submits)).results]
        if ACCEPTED in outcomes:
            await self.client.score_all()
        return outcomes

    async def publish(self, step: int) -> None:
        """A version whose manifest lies in the store."""
        number, incarnation = await self.client.reserve(step), self.client.incarnation
        key = f"versions/{number:08d}-{incarnation}/manifest.json"
        await self.store.put(key, json.dumps({"number": number, "step": step, "incarnation": incarnation}).encode())
        await self.client.announce(policy_pb2.PolicyVersion(
            number=number, step=step, incarnation=incarnation, manifest_key=key))

    async def check_log(self) -> None:
        """What was logged stays as it was, and no draw is in two batches."""
        for number in await numbers(self.store):
            header = await read_header(self.store, number)
            assert self.logged.setdefault(number, header) == header, number
        trained = [draw for header in self.logged.values() for draw in draws(header)]
        assert len(trained) == len(set(trained))

    def remember(self) -> None:
        """A copy of all that Redis has on its disk now."""
        shutil.copytree(self.redis.folder / "appendonlydir", self.copy)

    def go_back(self, copy: bool = True) -> None:
        """Redis dies, and comes back with that copy, or with nothing."""
        self.redis.kill()
        shutil.rmtree(self.redis.folder / "appendonlydir")
        if copy:
            shutil.copytree(self.copy, self.redis.folder / "appendonlydir")
        self.redis.start()

    def rebuilds(self) -> dict[str, float]:
        """Proof -> how many rebuilds."""
        [family] = self.metrics.ledger_rebuilds.collect()
        return {s.labels["proof"]: s.value for s in family.samples if s.name.endswith("_total")}

    def record(self, epoch: int) -> dict[str, object]:
        return json.loads((Path(self.store.url.removeprefix("file://")) / f"ledger/rebuilt-{epoch:03d}.json").read_text())


def draws(batch: batches_pb2.Batch) -> list[int]:
    return [group.draw.number for group in batch.groups]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(tmp_path / "redis", "always") as process:
        yield process


@contextlib.asynccontextmanager
async def scene(redis: RedisProcess, folder: Path, run: RunFile | None = None) -> AsyncIterator[Scene]:
    async with buffer(redis, folder / "objects", run) as client:
        yield Scene(client, redis, folder)


async def test_an_emptied_redis(redis: RedisProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two batches are numbered, one of them is in the checkpoint; then Redis has nothing. The next trainer start rebuilds the
    ledger: what was known is dropped by name, the rest is an interval; old leases are outdated; the run goes on to its end."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        assert (await s.step(1), await s.step(2)) == ([0, 1], [2, 3])
        old = list((await s.client.lease()).leases)  # draws 6 and 7; 4 and 5 are complete
        s.go_back(copy=False)
        taken = await s.start(checkpoint=1, above=1)
        assert (taken.ledger_epoch, taken.incarnation, taken.numbered_batch, taken.committed_batch) == (2, 2, 2, 1)
        assert s.rebuilds() == {"checkpoint": 1}
        assert s.record(2) == {
            "epoch": 2, "proof": "checkpoint", "checkpoint": 1, "numbered": 2, "next_draw": 6,
            "dropped": {"ledger lost": [4, 5]}, "unknown": {"from": 6, "at_most_open": 2}}
        assert "dropped(ledger lost): draws 4, 5 (2)" in caplog.text
        balance = await s.ledger.balance()
        assert balance.dropped == {"ledger lost": 2}
        balance.check(2)
        assert [line["draw"] for line in await s.ledger.archive() if line.get("reason") == "ledger lost"] == [4, 5]
        assert set(await s.hand_in(old, 2)) == {OUTDATED}
        assert draws((await s.client.batch(2)).batch) == [2, 3]  # trained again, from the log
        await s.publish(2)
        for batch in (3, 4, 5):
            assert await s.step(batch) == [2 * batch, 2 * batch + 1]  # 6 and 7 are drawn again, under the new epoch
        assert await s.client.commit(5) == 5
        (await s.ledger.balance()).check(2)


async def test_an_epoch_is_never_given_out_twice(redis: RedisProcess, tmp_path: Path) -> None:
    """Redis is emptied twice in a row, with nothing logged between: the third ledger still has another epoch."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        await s.step(1)
        leases = []
        for epoch in (2, 3):
            s.go_back(copy=False)
            taken = await s.start(checkpoint=1, above=epoch)
            assert taken.ledger_epoch == epoch
            leases.append(list((await s.client.lease()).leases))
            assert {lease.lease.sample.draw.ledger_epoch for lease in leases[-1]} == {epoch}
        assert draws_of(leases[0]) == draws_of(leases[1])
        assert set(await s.hand_in(leases[0], 1)) == {OUTDATED}
        assert set(await s.hand_in(leases[1], 1)) == {ACCEPTED}


def draws_of(leases: list[samples_pb2.SampleLease]) -> list[int]:
    return sorted({lease.lease.sample.draw.number for lease in leases})


@pytest.mark.parametrize(("checkpoint", "proof"), [(0, "batch_log"), (2, "checkpoint"), (3, "checkpoint")])
async def test_a_rewound_redis(redis: RedisProcess, tmp_path: Path, checkpoint: int, proof: str) -> None:
    """Redis comes back as it was before batches 2 and 3 were numbered (and before their commit): it would number them anew,
    with other groups. Instead the log's are served; each draw is in one batch at most."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        await s.step(1)
        s.remember()
        await s.step(2)
        await s.step(3)
        if checkpoint:
            await s.client.commit(checkpoint)
        s.go_back()
        taken = await s.start(checkpoint)
        assert (taken.ledger_epoch, taken.numbered_batch, taken.committed_batch) == (2, 3, checkpoint)
        assert s.rebuilds() == {proof: 1}
        for batch in range(checkpoint + 1, 4):
            assert (await s.client.batch(batch)).batch == s.logged[batch]
            await s.publish(batch)
        for batch in (4, 5):
            assert not set(await s.step(batch)) & {draw for n in (1, 2, 3) for draw in draws(s.logged[n])}
        assert await s.client.commit(5) == 5
        (await s.ledger.balance()).check(2)


async def test_a_trainer_that_lives_on_is_told(redis: RedisProcess, tmp_path: Path) -> None:
    """The trainer has batch 3 while Redis goes back to batch 1: its next lease, its commit, and (after a loss of all data) any
    call with its incarnation are refused as LEDGER_BEHIND, which ends it; its next start rebuilds the ledger."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        await s.step(1)
        s.remember()
        await s.step(2)
        await s.step(3)
        s.go_back()
        for call in (lambda: s.client.batch(4, wait_s=0), lambda: s.client.commit(3)):
            await refused(call, "LEDGER_BEHIND")
        s.go_back(copy=False)
        await refused(lambda: s.client.batch(4, wait_s=0), "LEDGER_BEHIND")
        assert (await s.start(checkpoint=3, above=1)).numbered_batch == 3
        await s.step(4)


async def refused(call, reason: str) -> None:
    """The call is refused for this reason, once Redis answers."""
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(Unavailable):
            with pytest.raises(Fenced) as error:
                await call()
            assert error.value.reason == reason
            return
        assert time.monotonic() < deadline


@pytest.mark.parametrize("another_front", [False, True])
async def test_a_batch_numbered_anew_is_never_served(redis: RedisProcess, tmp_path: Path, another_front: bool) -> None:
    """The reply with batch 2 was lost, Redis goes back, other samples come in, and the trainer asks for batch 2 again: the
    ledger numbers other groups than those of the log. Neither is served; the next start finds the log right."""
    async with contextlib.AsyncExitStack() as stack:
        s = await stack.enter_async_context(scene(redis, tmp_path))
        await s.start()
        await s.step(1)
        s.remember()
        await s.hand_in(list((await s.client.lease()).leases), 1)
        first = (await s.client.batch(2)).batch  # this reply is lost
        s.go_back()
        if another_front:
            s = await stack.enter_async_context(scene(redis, tmp_path))
            s.client.incarnation = 1
        await s.check_log()
        leases = []
        async with contextlib.AsyncExitStack():
            deadline = time.monotonic() + 10
            while not leases:
                with contextlib.suppress(Unavailable):
                    leases = list((await s.client.lease()).leases)
                assert time.monotonic() < deadline
        await s.hand_in(leases, 1)
        await refused(lambda: s.client.batch(2), "LEDGER_BEHIND")
        taken = await s.start(checkpoint=1)
        assert (taken.numbered_batch, taken.ledger_epoch, s.rebuilds()) == (2, 2, {"composition": 1})
        assert (await s.client.batch(2)).batch == first
        await s.publish(2)
        await s.step(3)


async def test_redis_goes_back_and_lacks_no_batch(redis: RedisProcess, tmp_path: Path) -> None:
    """What it has forgotten is a publication number, then an incarnation, which it would give out again; then samples: the
    checkpoint knows a later moment of the ledger."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        await s.step(1)
        s.remember()
        await s.publish(1)
        s.go_back()
        await s.start(checkpoint=1, above=1)
        assert s.rebuilds() == {"version": 1}
        assert (await s.client.reserve(1)) > 4
    shutil.rmtree(tmp_path / "copy")
    async with scene(redis, tmp_path) as s:
        s.remember()
        taken = await s.client.take_incarnation(checkpoint_batch=1, above=2)
        s.go_back()
        again = await s.start(checkpoint=1, above=taken.incarnation)
        assert (again.incarnation, s.rebuilds()) == (taken.incarnation + 1, {"incarnation": 1})
        later = await s.client.take_incarnation(
            checkpoint_batch=1, checkpoint_epoch=again.ledger_epoch, checkpoint_sequence=again.ledger_sequence + 1000)
        assert later.ledger_epoch == again.ledger_epoch + 1 and later.ledger_sequence > again.ledger_sequence + 1000
        assert s.rebuilds() == {"incarnation": 1, "checkpoint": 1}


async def test_a_pinned_run_draws_again_what_it_lost(redis: RedisProcess, tmp_path: Path) -> None:
    """Which draws batch 3 has is fixed: they are drawn again with the same seeds, at the version that they name."""
    async with scene(redis, tmp_path, run_file(mode="pinned", max_lag=1)) as s:
        await s.start()
        await s.step(1)
        await s.step(2)
        lost = list((await s.client.lease()).leases)  # 6 and 7; 4 and 5 are complete
        s.go_back(copy=False)
        await s.start(checkpoint=2, above=1)
        again = list((await s.client.lease()).leases)
        assert (draws_of(lost), draws_of(again)) == ([6, 7], [4, 5, 6, 7])
        tasks = [{(a.lease.sample.draw.number, a.task.index, a.task.seed) for a in leases} for leases in (lost, again)]
        assert tasks[0] < tasks[1]
        assert s.record(2)["dropped"] == {"ledger lost": []}
        await s.hand_in(again, 2)
        assert draws((await s.client.batch(3)).batch) == [4, 5]


async def test_without_ledger_and_log_the_start_is_refused(redis: RedisProcess, tmp_path: Path) -> None:
    """The checkpoint is at batch 2, but neither Redis nor the batch log knows of it: nothing can be rebuilt; it is counted."""
    async with scene(redis, tmp_path) as s:
        await refused(lambda: s.client.take_incarnation(checkpoint_batch=2, above=1), "LEDGER_LOST")
        assert s.metrics.refused_starts.labels("LEDGER_LOST")._value.get() == 1


async def test_the_newest_checkpoint_is_damaged_after_its_batches_were_closed(redis: RedisProcess, tmp_path: Path) -> None:
    """The trainer can read an older checkpoint only, and the ledger has forgotten what came after it: going on from there would
    be another run under the same name. It is refused by name, with the way out, and counted; the log is whole for the fork."""
    async with scene(redis, tmp_path) as s:
        await s.start()
        await s.step(1)
        await s.step(2)
        await s.client.commit(2)
        with pytest.raises(Fenced, match=r"slipstream fork svc@1") as error:
            await s.client.take_incarnation(checkpoint_batch=1, above=1)
        assert error.value.reason == "FORK"
        assert s.metrics.refused_starts.labels("FORK")._value.get() == 1
        await s.check_log()
        assert len(await s.client.read(2)) == 4
