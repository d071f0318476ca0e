"""What goes wrong quietly: a lease between two versions, an environment that always fails, a scorer that always fails."""

import asyncio
from types import SimpleNamespace

import numpy as np

from services.rollout.worker import MOST_PAUSE_S, RolloutWorker
from services.trainer.batches import assemble
from slipstream.cli.run import verdict
from slipstream.lifecycle import SystemClock, Waits
from slipstream.protos.buffer.v1 import batches_pb2, samples_pb2
from slipstream.sample import Sample, Segment, Span, crc32c, encode


class Swapping:
    """An engine whose thread swaps from step 30 to step 31 after the first question."""

    asked = 0

    @property
    def version(self):
        self.asked += 1
        return SimpleNamespace(step=30 if self.asked == 1 else 31, number=1)


def worker(**fields) -> RolloutWorker:
    """A worker with just the parts that a test touches."""
    made = object.__new__(RolloutWorker)
    events = {name: asyncio.Event() for name in ("_room", "_idle", "_quiet")}
    fields = {"_pinned": False, "_slots": 8, "_done": [], "_submitting": 0, "_held": [], **events, **fields}
    for name, value in fields.items():
        setattr(made, name, value)
    return made


async def test_a_swap_between_two_questions_loses_no_lease():
    """The engine's thread may change the version while leases are sorted: each is either started or still held."""
    leases = [samples_pb2.SampleLease(min_step=31, seed=i) for i in range(3)]
    played = []
    player = SimpleNamespace(running={}, play=played.extend)
    one = worker(_held=list(leases), _engine=Swapping(), _player=player, weights=SimpleNamespace(swapping=False))
    one._advance()
    assert sorted(lease.seed for lease in [*played, *one._held]) == [0, 1, 2]


async def test_an_environment_that_always_fails_is_asked_more_slowly():
    """The pause grows with the failures in a row, up to a limit, and says why; one success ends it."""
    slept, waits = [], Waits(SystemClock())

    async def sleep(seconds):
        slept.append((seconds, waits.current))

    player = SimpleNamespace(failures=640, failure="reset raised KeyError: 'boom'", running={})
    one = worker(_player=player, _context=SimpleNamespace(waits=waits, clock=SimpleNamespace(sleep=sleep)))
    await one._spare_a_broken_environment()
    player.failures = 10**9
    await one._spare_a_broken_environment()
    player.failures = 0
    await one._spare_a_broken_environment()
    assert [seconds for seconds, _ in slept] == [1.0, MOST_PAUSE_S]
    assert "640 episodes in a row failed" in slept[0][1][0] and "boom" in slept[0][1][0]


def test_failed_scores_are_counted_by_reason():
    """They train as 0, and the batch says how many and why."""
    tokens = np.arange(3, dtype=np.int32)
    body = encode(Sample([Segment(tokens, tokens > 1, -np.ones(1, np.float32), (Span(1, 0, 1, 1),))]))
    batch, bodies = batches_pb2.Batch(batch=1), {}
    group = batch.groups.add(group_size=3)
    for i, failure in enumerate(("", "timeout after 10 s", "timeout after 10 s")):
        member = group.members.add()
        member.sample.index, member.score.scalar, member.score.failure = i, 1.0, failure
        member.body.crc32c = crc32c(body)
        bodies[0, 0, i] = body
    found = assemble(batch, bodies)
    assert found.score_failures == {"timeout after 10 s": 2}
    assert [m.reward for m in found.groups[0].members] == [1.0, 0.0, 0.0]


def test_a_run_whose_scores_all_fail_is_no_success(capsys):
    """Exit code 1 and a line with the reason; a stop asked for is not held against the target, a failing scorer is."""
    run = SimpleNamespace(run=SimpleNamespace(target_reward=0.8))
    last = {"samples": 2, "score_failures": {}}
    metrics = SimpleNamespace(step=3, first_and_last_reward=(0.0, 0.1), last=last)
    clean = SimpleNamespace(clean=True, sentence="")
    assert verdict(run, metrics, clean, stopped=True) == 0
    assert verdict(run, metrics, clean, stopped=False) == 1
    last["score_failures"] = {"exception: TypeError": 2}
    assert verdict(run, metrics, clean, stopped=True) == 1
    assert "exception: TypeError" in capsys.readouterr().err
