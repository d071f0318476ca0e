"""The torch engine as asyncio sees it: futures, streams, swaps, aborts, and its own end."""

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
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, Span
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


async def test_generate_and_stream_agree(tmp_path: Path) -> None:
    """A stream's pieces add up to what the future gives; spans, finish reason and routes come with the last."""
    async with engine(tmp_path, rollout={"capture_routes": True}) as subject:
        whole = await subject.generate(Request(PROMPT, 30, seed=4, routes=True))
        pieces = [piece async for piece in subject.stream(Request(PROMPT, 30, seed=4, routes=True))]
        assert np.concatenate([p.tokens for p in pieces]).tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(np.concatenate([p.logprobs for p in pieces]), whole.logprobs, atol=1e-6)
        assert sum(s.length for p in pieces for s in p.spans) == 30 and whole.spans == (Span(1, 0, 1, 30),)
        assert [p.finish_reason for p in pieces] == [0] * (len(pieces) - 1) + [FINISH_LENGTH]
        assert pieces[-1].routes is not None and pieces[-1].routes.shape == (len(PROMPT) + 29, 2, 2)
        assert subject.generated_tokens == 60 and subject.free_slots == 16
        assert subject.stop_token_ids == (1,)


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


async def test_a_refused_swap_is_an_error_and_the_old_version_serves(tmp_path: Path) -> None:
    """Tensors that do not fit: `swap` raises, nothing else changes."""
    async with engine(tmp_path) as subject:
        before = await subject.generate(Request(PROMPT, 10, seed=1))
        with pytest.raises(InvalidInput):
            await subject.swap(PolicyVersion(number=2, step=1), weights(run_file(tmp_path), seed=1)[1][:-1])
        after = await subject.generate(Request(PROMPT, 10, seed=1))
        assert after.logprobs.tobytes() == before.logprobs.tobytes() and subject.version and subject.version.number == 1


async def test_abort_cancel_and_stop_leave_nobody_waiting(tmp_path: Path) -> None:
    """abort gives partial tokens; a cancelled future frees its slot; a closed stream too; stop ends the rest as aborted."""
    async with engine(tmp_path) as subject:
        request = Request(PROMPT, 60, seed=1)
        future, cancelled, rest = (subject.generate(r) for r in (request, Request(PROMPT, 60), Request(PROMPT, 60)))
        async with contextlib.aclosing(subject.stream(Request(PROMPT, 60))) as stream:
            await anext(stream)
        subject.abort([request.id])
        cancelled.cancel()
        partial = await future
        assert partial.finish_reason == FINISH_ABORT and len(partial.tokens) < 60
        await subject.stop()
        assert (await rest).finish_reason in (FINISH_ABORT, FINISH_LENGTH) and subject.free_slots == 16


async def test_bad_requests_and_an_engine_without_weights(tmp_path: Path) -> None:
    """Refused at the call, by name; before the first version everything is Unavailable."""
    subject = TorchEngine(run_file(tmp_path))
    with pytest.raises(Unavailable, match="no policy version"):
        subject.generate(Request(PROMPT, 3))
    async with engine(tmp_path) as subject:
        for bad in (Request(PROMPT[:0], 3), Request(PROMPT, 3, temperature=0), Request(np.ones(64, np.int32), 3)):
            with pytest.raises(InvalidInput):
                subject.generate(bad)
        assert subject.free_slots == 16


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
