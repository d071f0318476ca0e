"""Spans of the hops, service by service: what the ledger did with a sample, and what the trainer did with a batch."""

from __future__ import annotations

from typing import Any

from services.buffer import spans
from services.buffer.connection import connect
from services.buffer.ledger import Scored
from services.buffer.redis_ledger import RedisLedger
from services.trainer.spans import StepSpans
from slipstream import tracing
from slipstream.lifecycle import SystemClock
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from tests.collector import Collector, Span
from tests.contract.ledger_bench import RULES, Bench, grant, submit
from tests.redis_server import RedisProcess
from tests.unit.test_tracing import run_file


def tracer(collector: Collector, service: str) -> tracing.Tracer:
    run = run_file(endpoint=collector.address, sample_share=1.0)
    return tracing.Tracer(run, service, f"{service}-0", SystemClock(), lambda outcome, count: None)


def told(collector: Collector, sample: tuple[int, int, int]) -> list[Span]:
    return collector.traces[f"{tracing.ids('traced', *sample)[0]:032x}"]


async def test_the_ledger_tells_every_step_of_a_sample(redis: RedisProcess) -> None:
    """Granted, lost, granted again, stored, scored, batched: in this order, durable when a span ends; the draw only once."""
    bench = Bench("memory", "")
    with Collector() as collector:
        own = tracer(collector, "buffer")
        client = connect(redis.url)
        ledger: Any = spans.ledger(own, client, RULES, lambda: bench.now)
        await ledger.open({"sort": 0})
        bench.now += 2000
        bench.incarnation = (await ledger.take_incarnation(0, 0)).incarnation
        await bench.publish(ledger, 0)
        lost = await grant(ledger, worker="w1")
        bench.now += RULES.lease_ms + 1
        grants = await grant(ledger, worker="w2")
        assert [g.lease.attempt for g in grants] == [2] * len(lost)
        await ledger.submit_samples([submit(lost[0])])  # a zombie's: fenced
        await ledger.submit_samples([submit(g) for g in grants])
        scoring = await ledger.grant_scoring("r", 100)
        await ledger.submit_scores([Scored(g.lease, b"1", 1.0) for g in scoring])
        assert (await ledger.number_batch(bench.incarnation, 1)).numbered
        await ledger.read_batch(1)
        await own.close()
        await client.aclose()
        found = told(collector, (1, 0, 0))
    assert [(s.name, s.attempt, s.attributes.get("outcome", "")) for s in found] == [
        ("draw", 0, ""), ("lease", 1, ""), ("lease", 2, ""), ("store sample", 1, "fenced"), ("store sample", 2, "accepted"),
        ("lease for a score", 1, ""), ("store score", 1, "accepted"), ("batch", 0, "")]
    assert [s.attributes["worker"] for s in found if s.name == "lease"] == ["w1", "w2"]
    assert found[-1].attributes["batch"] == 1 and found[0].attributes["environment"] == "sort"


def test_without_a_tracer_the_ledger_is_the_plain_one(redis: RedisProcess) -> None:
    assert type(spans.ledger(None, connect(redis.url), RULES)) is RedisLedger


async def test_the_trainer_tells_which_step_and_which_version() -> None:
    """A version is of all steps up to its own that none was of before; a step that none covers is told by itself."""
    with Collector() as collector:
        own = tracer(collector, "trainer")
        steps = StepSpans(own)
        for step in (1, 2, 3):
            steps.trained(step, [(10 + step, 0, 0, 1, 0)], 0.5, 4)  # draw, sample, checksum, epoch, checksum
            if step == 2:
                steps.published(PolicyVersion(number=7, step=2), 0.25)
        await own.close()
        found = [told(collector, (1, 10 + step, 0)) for step in (1, 2, 3)]
    assert [[s.name for s in trace] for trace in found] == [["train", "publish"], ["train", "publish"], ["train"]]
    for step, (train, publish) in zip((1, 2), found, strict=False):
        assert train.attributes["step"] == publish.attributes["step"] == step and train.attributes["incarnation"] == 4
        assert publish.attributes["version"] == 7
        assert abs(train.ended - train.started - 5e8) < 1e6 and abs(publish.ended - publish.started - 2.5e8) < 1e6
    StepSpans(None).trained(1, [], 0.5, 1)
