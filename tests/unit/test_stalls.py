"""No quiet wait: what counts as progress, what a stall says, and when a run is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.buffer.front import Front
from services.buffer.ledger import Balance, Rules
from services.buffer.memory_ledger import MemoryLedger
from services.buffer.stalls import Stalls
from slipstream.cli.stall import AGE, StallWatch
from slipstream.cli.survey import ServiceStatus
from slipstream.config import RunFile
from slipstream.lifecycle import Lifecycle, SystemClock, Waits
from slipstream.progress import Progress
from slipstream.service import ServiceContext, open_context
from slipstream.service_command import ServiceArguments
from slipstream.telemetry import BufferMetrics
from tests.buffer_client import run_file
from tests.contract.test_service import wait_until
from tests.rollout_runs import run_file as tiny
from tests.scripted_buffer import ScriptedBuffer, Turns, published, service


def turns(folder: Path, stall_s: float) -> RunFile:
    """A run of `Turns`, one to three turns an episode."""
    return tiny(folder, f"{Turns.__module__}:Turns", service={"stall_s": stall_s, "metrics": False})


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_process_stalls_only_while_something_is_awaited() -> None:
    """The count starts with the last progress, or with the moment at which there was something to do again."""
    clock, state = HandClock(), {"tokens": 0, "awaiting": "tokens of 3 sequences"}
    progress = Progress(clock, lambda: state["tokens"], lambda: str(state["awaiting"]))
    progress.look()
    clock.now += 10
    progress.look()
    assert progress.awaited == ("tokens of 3 sequences", 10) and progress.age_s == 10
    state["awaiting"] = ""
    progress.look()
    assert progress.awaited == ("", 0.0) and progress.age_s == 10
    clock.now += 50
    progress.look()
    state["awaiting"] = "tokens of 1 sequences"
    clock.now += 5
    progress.look()
    assert progress.awaited == ("tokens of 1 sequences", 5) and progress.age_s == 65
    state["tokens"] = 1
    progress.look()
    assert progress.awaited[1] == 0 and progress.age_s == 0


def test_a_patient_wait_is_shown_and_is_no_stall() -> None:
    """A trainer may wait for a batch as long as the buffer vouches for it; inside, a buffer that is away still counts."""
    clock = HandClock()
    waits = Waits(clock)
    with waits.on("batch 7", patient=True):
        clock.now += 1000
        assert waits.current == ("batch 7", 1000) and waits.impatient is None
        with waits.on("batch 7: the buffer"):
            clock.now += 5
            assert waits.current == ("batch 7", 1005) and waits.impatient == ("batch 7: the buffer", 5)


@contextlib.asynccontextmanager
async def a_service(folder: Path, stall_s: float) -> AsyncIterator[ServiceContext]:
    """A served process that does nothing but watch itself."""
    run = turns(folder, stall_s)
    lifecycle = Lifecycle(SystemClock())
    arguments = ServiceArguments(run, "rollout", "rollout-0", "127.0.0.1:1")
    async with open_context(arguments, lifecycle, lifecycle.clock) as context:
        await context.serve([])
        lifecycle.spawn("wait metrics", context.watch_waits())
        yield context
        lifecycle.finish()
        assert await lifecycle.run() == 0


async def test_a_lack_of_progress_is_told_like_a_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing waits, tokens are awaited and none come: state, one log line, what status shows; over with the next token."""
    caplog.set_level("INFO", "slipstream")
    tokens = [0]
    async with a_service(tmp_path, stall_s=0.1) as context:
        context.judge_progress(lambda: tokens[0], lambda: "tokens of 2 sequences in flight")
        await wait_until(lambda: "stalled: waiting for tokens of 2 sequences in flight" in caplog.text)
        assert context.stuck and context.state == "stalled" and context.awaited[0] == "tokens of 2 sequences in flight"
        assert context.registry.get_sample_value("slipstream_progress_age_seconds") > 0.1
        context.judge_progress(lambda: tokens[0], lambda: "")
        await wait_until(lambda: "no longer stalled" in caplog.text)
        assert not context.stuck and context.state == "serving" and caplog.text.count("stalled: waiting") == 1


async def test_a_stuck_worker_stops_keeping_its_leases(tmp_path: Path) -> None:
    """A hanging engine must not hold samples for ever: without progress for stall_s the heartbeats end, so others take over."""
    scripted, run = ScriptedBuffer(), turns(tmp_path, 0.2)
    await published(run, scripted, 1, 0)
    await scripted.grant(3, min_step=1)
    async with service(run, scripted) as context:
        await scripted.until(lambda: {3} in scripted.beats)
        context.judge_progress(lambda: 0, lambda: "tokens of 1 sequences in flight")
        await wait_until(lambda: context.stuck)
        beats, silence = len(scripted.beats), asyncio.get_running_loop().time() + 6 * run.rollout.heartbeat_s
        await wait_until(lambda: asyncio.get_running_loop().time() > silence)
        assert len(scripted.beats) <= beats + 1, "one may have been on its way"
        beats = len(scripted.beats)
        context.judge_progress(lambda: 0, lambda: "")
        await scripted.until(lambda: len(scripted.beats) > beats)


class Fleet:
    """A buffer's view of a run of 2 groups of 2 samples a batch, told by hand."""

    def __init__(self) -> None:
        self.front = Front(MemoryLedger(Rules.of(run_file()), lambda: 0), BufferMetrics(CollectorRegistry()))
        self.stalls = Stalls(self.front, lease_s=60)
        self.front.hear("trainer", "trainer")
        self.front.waiting["trainer"] = "batch 1: 2 of 2 groups unfinished"

    def look(self, samples: dict[str, int] | None = None, **meta: Any) -> object:
        meta = {"next_draw": 2, "published": 0, "numbered": 0, "committed": 0, "incarnation": 1, **meta}
        self.stalls.look(Balance(meta, samples or {}, {}, {}))
        return self.stalls.marker

    def keep_leases(self) -> None:
        self.front.hear("rollout", "rollout-0")
        self.front.leases_kept = asyncio.get_running_loop().time()


async def test_scores_batches_and_versions_are_progress_and_grants_are_not() -> None:
    """What a dead fleet does without end, lapsing leases and failing samples, moves no clock."""
    fleet = Fleet()
    marker = fleet.look({"leased": 4})
    assert fleet.look({"leased": 3, "closed": 1}, expired=7, next_draw=9) == marker
    for change in ({"numbered": 1}, {"published": 1}, {"committed": 1}):
        assert fleet.look({"leased": 4}, **change) != marker
        marker = fleet.look({"leased": 4})
    assert fleet.look({"leased": 3, "unscored": 1}) != marker


async def test_a_long_generation_is_no_stall_and_a_dead_fleet_is() -> None:
    """While leases are kept alive, none lapsed and no sample failed, time does not count; without any of these it does."""
    fleet = Fleet()
    marker = fleet.look({"leased": 1, "scored": 3})
    fleet.keep_leases()
    assert (after := fleet.look({"leased": 1, "scored": 3})) != marker
    assert fleet.look({"leased": 1, "scored": 3}, expired=1) == after, "a worker died"
    assert fleet.look({"leased": 1, "scored": 3, "closed": 1}) == after, "a sample failed"
    assert fleet.look({"leased": 0, "scored": 3}) == after, "nobody generates"
    assert fleet.look({"leased": 1, "scored": 3}) != after
    fleet.front.leases_kept -= 61
    assert fleet.look({"leased": 1, "scored": 3}) == fleet.look({"leased": 1, "scored": 3}), "the only worker is silent"


async def test_the_sentence_names_what_is_missing() -> None:
    """From the start of a run to its end: who has to come, who has to work, and why it fails."""
    fleet = Fleet()
    fleet.look(published=-1, incarnation=0)
    assert fleet.stalls.awaiting() == "the first policy version: no trainer has connected"
    fleet.look(published=-1)
    assert fleet.stalls.awaiting() == "the first policy version: the trainer has not published one"
    fleet.look({"unscored": 2})
    assert fleet.stalls.awaiting() == (
        "batch 1: 2 of 2 groups unfinished; no rollout worker is connected; 2 samples wait for a score and no reward worker is "
        "connected")
    fleet.keep_leases()
    fleet.front.hear("reward", "reward-0")
    assert fleet.stalls.awaiting() == "batch 1: 2 of 2 groups unfinished"
    fleet.front.waiting["rollout"] = "the policy version of step 1"
    assert fleet.stalls.awaiting().endswith("; rollout workers wait for the policy version of step 1")
    fleet.look({"leased": 2, "unscored": 2, "closed": 3}, expired=5)
    assert "3 samples were closed without a score meanwhile" in fleet.stalls.awaiting()
    assert "5 leases lapsed meanwhile" in fleet.stalls.awaiting()
    fleet.front.heard["trainer"]["trainer"] -= 31
    assert fleet.stalls.awaiting() == "batch 1: no trainer asks for it"
    del fleet.front.waiting["trainer"]
    fleet.look(numbered=2, committed=1)
    assert fleet.stalls.awaiting() == "the trainer, to train and commit batch 2"
    fleet.stalls.unreachable = "Redis: connection refused"
    assert fleet.stalls.awaiting() == "Redis: connection refused"
    fleet.look(numbered=20, committed=20)
    assert fleet.stalls.awaiting() == "", "every batch of the run is committed"


def status(instance: str, age: float | None = None, state: str = "serving", waiting_for: str = "") -> ServiceStatus:
    figures = {} if age is None else {AGE: age}
    return ServiceStatus(instance, instance.partition("-")[0], state, waiting_for=waiting_for, figures=figures)


def test_the_supervisor_tells_once_and_then_gives_up() -> None:
    """The younger of the buffer's and the trainer's progress counts. A stall is told when it begins and when it ends; a
    buffer that is silent counts from when it last got on; after give_up_s the run is over, with the reason."""
    clock = HandClock()
    watch = StallWatch(clock.monotonic, stall_s=60, give_up_s=200)
    waiting = "batch 3: 2 of 2 groups unfinished; no rollout worker is connected"

    def look(seconds: float, *services: ServiceStatus) -> str:
        clock.now += seconds
        return watch.look(services)

    assert look(59, status("buffer", 59), status("trainer-0", 300)) == "" and watch.stall is None
    assert look(50, status("buffer", 109), status("trainer-0", 5)) == "", "a trainer that warms up gets on"
    crashing = status("rollout-0", state="backing off")
    event = look(60, status("buffer", 169, waiting_for=waiting), status("trainer-0", 65), crashing)
    assert event == f"stalled: no progress for 65 s, waiting for {waiting}; rollout-0 is backing off"
    assert look(10, status("buffer", 179, waiting_for=waiting), status("trainer-0", 75)) == "" and watch.stall is not None
    assert look(10, status("buffer", 1)) == "no longer stalled, after 75 s" and watch.stall is None
    assert look(100, status("buffer", state="silent")).startswith(
        "stalled: no progress for 101 s, waiting for the buffer, which is silent")
    assert watch.over == ""
    look(100, status("buffer", 201, waiting_for=waiting, state="stalled"))
    assert watch.over == f"given up: no progress for 201 s, waiting for {waiting} (service.give_up_s = 200; 0 = wait for ever)"


def test_give_up_of_zero_waits_for_ever() -> None:
    """For those who would rather be alerted."""
    clock = HandClock()
    watch = StallWatch(clock.monotonic, stall_s=60, give_up_s=0)
    clock.now += 1e6
    assert watch.look([]).startswith("stalled: no progress for 1000000 s, waiting for the buffer") and watch.over == ""


@pytest.mark.parametrize(("service", "told"), [
    (status("rollout-1", state="stalled", waiting_for="tokens of 3 sequences"), "rollout-1 waits for tokens of 3 sequences"),
    (status("rollout-1", waiting_for="a pause: 64 episodes in a row failed"), "rollout-1 waits for a pause: 64"),
    (status("reward-0", state="silent"), "reward-0 is silent"),
])
def test_processes_that_are_not_well_are_named(service: ServiceStatus, told: str) -> None:
    clock = HandClock()
    watch = StallWatch(clock.monotonic, stall_s=60, give_up_s=0)
    clock.now += 61
    assert told in watch.look([status("buffer", 61), status("rollout-0"), service])
