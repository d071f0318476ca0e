"""How a process stops: in stages, in order, with an exit code that tells the truth; and how its waits are seen."""

import asyncio

import pytest

from slipstream.errors import ConfigError, Fenced, Unavailable
from slipstream.lifecycle import Lifecycle, SystemClock, Waits


@pytest.fixture
def lifecycle():
    return Lifecycle(SystemClock(), stage_timeout_s=0.05)


class HandClock:
    """A clock that only moves when told."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def unix(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


async def test_a_stop_goes_through_its_stages_in_order(lifecycle):
    """Stages 0 to 4 whatever the order of registration; within a stage in order of registration; tasks end before `close`."""
    events = []

    def note(text):
        async def stop():
            events.append(text)
        return stop

    async def loop():
        try:
            await asyncio.Event().wait()
        finally:
            events.append("loop cancelled")

    for stage in (4, 2, 0, 3, 1):
        lifecycle.on_stop(stage, note(f"stage {stage}"))
    lifecycle.on_stop(2, note("stage 2, second"))
    lifecycle.spawn("loop", loop())
    running = asyncio.create_task(lifecycle.run())
    await asyncio.sleep(0)
    lifecycle.request_stop("SIGTERM")
    assert await running == 0
    assert events == ["stage 0", "stage 1", "stage 2", "stage 2, second", "stage 3", "loop cancelled", "stage 4"]
    assert lifecycle.reason == "SIGTERM"


async def test_a_loop_may_end_by_itself_once_stopping(lifecycle):
    """Watching `stopping` is the polite way to end; it is no error."""
    async def loop():
        await lifecycle.stopping.wait()

    lifecycle.spawn("loop", loop())
    lifecycle.finish()
    assert await lifecycle.run() == 0 and lifecycle.finished


@pytest.mark.parametrize("error, code", [
    (RuntimeError("bug"), 1), (Unavailable("gone"), 1), (ConfigError("bad setting"), 2), (Fenced("a newer trainer runs"), 3)])
async def test_a_task_that_raises_stops_the_process(lifecycle, error, code):
    """And the exit code says whether a restart could help."""
    async def loop():
        raise error

    lifecycle.spawn("loop", loop())
    assert await lifecycle.run() == code
    assert lifecycle.error is error and "loop failed" in lifecycle.reason


async def test_an_endless_task_that_returns_stops_the_process(lifecycle):
    """A loop whose end nobody notices is how services hang; here it is exit code 1. A task that may end says so."""
    async def loop():
        return None

    lifecycle.spawn("one-off", loop(), endless=False)
    await asyncio.sleep(0)
    assert not lifecycle.stopping.is_set()
    lifecycle.spawn("loop", loop())
    assert await lifecycle.run() == 1
    assert lifecycle.reason == "the endless task loop returned"


async def test_a_stage_that_hangs_or_fails_does_not_hold_up_the_rest(lifecycle):
    """Each has its deadline; later stages still run; the exit code is not zero, since something was left behind."""
    events = []

    async def hang():
        await asyncio.Event().wait()

    async def close():
        events.append("closed")

    lifecycle.on_stop(2, hang)
    lifecycle.on_stop(4, close)
    lifecycle.finish()
    assert await lifecycle.run() == 1
    assert events == ["closed"]


async def test_an_error_in_a_stage_is_an_error_of_the_process(lifecycle):
    """A flush that fails may not end in exit code 0."""
    async def flush():
        raise OSError("disk full")

    lifecycle.on_stop(3, flush)
    lifecycle.finish()
    assert await lifecycle.run() == 1


async def test_losing_the_buffer_while_stopping_is_no_failure(lifecycle):
    """In an ordered shutdown others stop too: a SlipstreamError after the stop began leaves exit code 0, a bug does not."""
    async def loop(error):
        await lifecycle.stopping.wait()
        raise error

    lifecycle.spawn("loop", loop(Unavailable("connection refused")))
    lifecycle.request_stop("SIGTERM")
    assert await lifecycle.run() == 0

    other = Lifecycle(SystemClock(), stage_timeout_s=0.05)

    async def broken():
        await other.stopping.wait()
        raise KeyError("x")

    other.spawn("loop", broken())
    await asyncio.sleep(0)
    other.request_stop("SIGTERM")
    assert await other.run() == 1


async def test_a_task_that_ignores_its_end_is_left_behind_and_named(lifecycle, caplog):
    """Cancelled, still running after the deadline: exit code 1, its name in the log."""
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = lifecycle.spawn("stubborn loop", stubborn())
    await asyncio.sleep(0)
    lifecycle.finish()
    assert await lifecycle.run() == 1
    assert "stubborn loop" in caplog.text
    release.set()
    await task


def test_waits_show_the_longest_one():
    """The oldest wait is what people should read; its time counts from its beginning, also when the sentence changes."""
    clock = HandClock()
    waits = Waits(clock)
    assert waits.current is None
    with waits.on("batch 7") as wait:
        clock.now += 5
        with waits.on("a reply"):
            clock.now += 1
            wait.sentence = "batch 7: 3 of 64 groups unfinished"
            assert waits.current == ("batch 7: 3 of 64 groups unfinished", 6.0)
    with waits.on("a reply"):
        assert waits.current == ("a reply", 0.0)
    assert waits.current is None


def test_a_wait_that_fails_is_over():
    """An exception inside does not leave a ghost in status."""
    waits = Waits(HandClock())
    with pytest.raises(KeyError), waits.on("x"):
        raise KeyError
    assert waits.current is None
