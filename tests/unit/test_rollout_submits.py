"""Finished samples travel together: how many SubmitSamples calls a step costs, and whom the company may not hold back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from services.buffer.sessions import NotOffered
from services.rollout import worker
from slipstream import config
from slipstream.environment import Action, Environment, Episode, Reset, Step, Task
from slipstream.protos.buffer.v1 import samples_pb2
from tests.rollout_runs import run_file
from tests.scripted_buffer import ScriptedBuffer, published, service

SLOTS = 16


class Lengths(Environment):
    """Task t takes t + 1 turns, so that the samples of a batch end one after the other; task 15 stays in turn 13 until `go`."""

    go = threading.Event()

    def reset(self, task: Task) -> Reset:
        return Reset("1=")

    def step(self, episode: Episode, action: Action) -> Step:
        if episode.task.index == 15 and episode.turn == 13:
            self.go.wait(30)
        done = episode.turn > episode.task.index
        return Step(None if done else "=", done=done, reward=1.0)


def lengths(folder: Path, **sections: Any) -> config.RunFile:
    rollout = {"slots": SLOTS, "context": 64, "max_new_tokens": 1, "heartbeat_s": 5}
    environment = {"max_turns": 20}
    return run_file(
        folder, f"{__name__}:Lengths", service={"metrics": False}, rollout=rollout, environment=environment, **sections)


async def test_a_batch_is_submitted_in_two_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve samples end in twelve different moments, one of them late. The first call goes when half of the slots are done,
    though others are in flight; the second takes the rest, and goes once nothing is left that it could wait for. Neither
    waits for GATHER_S, which is a minute here."""
    monkeypatch.setattr(worker, "GATHER_S", 60.0)
    run, buffer = lengths(tmp_path), ScriptedBuffer()
    await published(run, buffer, 1, 0)
    async with service(run, buffer):
        for start in (0, 100):
            Lengths.go.clear()
            buffer.submits.clear()
            for task in (*range(11), 15):
                await buffer.grant(start + task, index=task)
            await buffer.until(lambda: len(buffer.submitted) >= SLOTS // 2)
            assert len(buffer.submits) == 1
            Lengths.go.set()
            await buffer.until(lambda: len(buffer.submitted) == 12)
            assert len(buffer.submits) == 2


async def test_company_is_not_waited_for_for_long(tmp_path: Path) -> None:
    """One sample's environment hangs: three that are finished wait for it GATHER_S, not until it is done."""
    Lengths.go.clear()
    run, buffer = lengths(tmp_path), ScriptedBuffer()
    await published(run, buffer, 1, 0)
    try:
        async with service(run, buffer):
            await buffer.grant(0, 1, 2, 15)
            await buffer.until(lambda: set(buffer.submitted) == {0, 1, 2})
            Lengths.go.set()
            await buffer.until(lambda: 15 in buffer.submitted)
            assert len(buffer.submits) <= 3
    finally:
        Lengths.go.set()


class StreamingBuffer(ScriptedBuffer):
    """Takes samples over streams; `offers` = whether it is of a release that does."""

    def __init__(self, offers: bool) -> None:
        super().__init__()
        self.offers, self.streams, self.calls = offers, 0, 0

    async def StreamSamples(self, requests: Any, context: Any) -> Any:
        self.streams += 1
        if not self.offers:
            raise NotOffered("not in this release", "UNIMPLEMENTED")
        async for request in requests:
            self.submits.append(list(request.samples))
            await self.notify()
            yield samples_pb2.StreamSamplesResponse(
                results=[samples_pb2.SubmitResult(outcome=samples_pb2.OUTCOME_ACCEPTED)] * len(request.samples))

    async def SubmitSamples(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return await super().SubmitSamples(request, context)


@pytest.mark.parametrize("offers", [True, False])
async def test_many_bytes_go_over_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offers: bool) -> None:
    """Where the buffer has streams; a former release is asked once, and then called as ever."""
    monkeypatch.setattr(worker, "STREAM_BYTES", 0)
    run, buffer = lengths(tmp_path), StreamingBuffer(offers)
    await published(run, buffer, 1, 0)
    async with service(run, buffer):
        for start in (0, 100):
            await buffer.grant(*range(start, start + 4), index=2)
            await buffer.until(lambda last=start + 3: last in buffer.submitted)
    assert set(buffer.submitted) == {*range(4), *range(100, 104)}
    for draw in buffer.submitted:
        assert len(buffer.sample(draw).segments[0].logprobs) == 3
    assert (buffer.streams > 1, buffer.calls > 0) == (offers, not offers)
