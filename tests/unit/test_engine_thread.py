"""The torch engine's thread: how requests reach it, and its end. What every engine promises is in tests/engines."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout import torch_engine
from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.rollout.torch_engine import TorchEngine
from slipstream.errors import InvalidInput, Unavailable
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH
from tests.rollout_runs import run_file, weights

PROMPT = np.array([3, 9, 12], np.int32)


@contextlib.asynccontextmanager
async def engine(folder: Path, **sections: Any):
    """A started engine that serves version 1 of step 0."""
    run = run_file(folder, **sections)
    files, tensors = weights(run)
    subject = TorchEngine(run)
    await subject.start(files, tensors, PolicyVersion(number=1, step=0, incarnation=1))
    try:
        yield subject
    finally:
        await subject.stop()


async def test_requests_of_one_turn_are_admitted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen requests made in one turn of the event loop reach the decoder before its next step, in one admission."""
    admitted: list[int] = []
    admit = Decoder._admit
    monkeypatch.setattr(Decoder, "_admit", lambda self: (rows := admit(self), admitted.append(len(rows)))[0])
    async with engine(tmp_path) as subject:
        admitted.clear()
        await asyncio.gather(*(subject.generate(Request(PROMPT, 5, seed=i)) for i in range(16)))
    assert admitted == [16]


async def test_a_swap_lands_between_steps_and_drops_nothing(tmp_path: Path) -> None:
    """Requests in flight finish under two versions; after `swap` returned every token is the new version's."""
    async with engine(tmp_path) as subject:
        _, tensors = weights(run_file(tmp_path), seed=1)
        stream = subject.stream(Request(PROMPT, 60, seed=1))
        first = await anext(stream)
        await subject.swap(PolicyVersion(number=2, step=1, incarnation=1), tensors)
        after = await subject.generate(Request(PROMPT, 3, seed=9))
        assert {s.version for s in after.spans} == {2} and subject.version and subject.version.number == 2
        versions = [s.version for s in first.spans] + [s.version async for piece in stream for s in piece.spans]
        assert versions == sorted(versions) and set(versions) == {1, 2}


async def test_stop_leaves_nobody_waiting(tmp_path: Path) -> None:
    """What is in flight ends as aborted, with what there is; slots are free."""
    async with engine(tmp_path) as subject:
        rest = subject.generate(Request(PROMPT, 60))
        await subject.stop()
        assert (await rest).finish_reason in (FINISH_ABORT, FINISH_LENGTH) and subject.free_slots == 16


def test_without_weights_everything_is_unavailable(tmp_path: Path) -> None:
    """Before the first version there is nothing to ask."""
    with pytest.raises(Unavailable, match="no policy version"):
        TorchEngine(run_file(tmp_path)).generate(Request(PROMPT, 3))


async def test_a_thread_that_dies_takes_nobody_with_it_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the decoder: every waiting future and every later call raises Unavailable; the worker then restarts."""
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    async with engine(tmp_path) as subject:
        monkeypatch.setattr(torch_engine.Decoder, "step", lambda self: 1 / 0)
        with pytest.raises(Unavailable, match="division by zero"):
            await subject.generate(Request(PROMPT, 3))
        with pytest.raises(Unavailable, match="division by zero"):
            subject.generate(Request(PROMPT, 3))


async def test_a_model_that_cached_decoding_gets_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start the engine compares itself with a full forward; here its masks are broken, and it says so instead of serving."""
    monkeypatch.setattr("services.rollout.kv.Masks.of", lambda self, positions, length: self.nothing.expand(1, 1, 1, length))
    run = run_file(tmp_path)
    with pytest.raises(InvalidInput, match="Qwen3MoeForCausalLM: cached decoding is"):
        await TorchEngine(run).start(*weights(run), PolicyVersion(number=1))
