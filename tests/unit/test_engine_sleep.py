"""The torch engine asleep: it holds no weights and little of its cache, and nobody can tell from the answers that it slept."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout.asleep import Asleep, bytes_of
from services.rollout.decoder import Decoder
from services.rollout.engine import Generation, Request
from services.rollout.torch_engine import TorchEngine
from slipstream.errors import Unavailable
from slipstream.model import state, views
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH
from tests.engine_models import full_logprobs, prompts, tiny
from tests.rollout_runs import run_file, weights

ROWS = 6
VERSION = PolicyVersion(number=1, step=0, incarnation=1)


def decoder(family: str, **options: Any) -> Decoder:
    model = tiny(family, "dense" if options.get("deterministic") else "grouped_mm")
    subject = Decoder(model, 16, 64, version=VERSION, **options)
    subject.loaded = state(model)
    views(model)  # as the canary looks at weights: memory that numpy has seen can no longer change its size
    return subject


def played(subject: Decoder, sleeps: bool) -> list[Generation]:
    """Six answers, in order; with `sleeps` a nap after 3, 9 and 20 steps."""
    requests = [Request(p, 24, seed=i) for i, p in enumerate(prompts(ROWS))]
    for request in requests:
        subject.submit(request)
    done: dict[int, Generation] = {}
    for step in range(1 << 10):
        done.update((request.id, generation) for request, generation in subject.step())
        if sleeps and step in (3, 9, 20):
            Asleep(subject).wake()
        if len(done) == len(requests):
            break
    return [done[request.id] for request in requests]


@pytest.mark.parametrize("family, options", [
    ("qwen3_moe", {}), ("gemma3_text", {}), ("qwen3_moe", {"deterministic": True, "recompute_on_swap": True})])
def test_a_sequence_goes_on_with_the_same_bits(family: str, options: dict[str, Any]) -> None:
    """Tokens and log-probabilities of a decoder that slept three times equal those of one that did not."""
    for slept, awake in zip(played(decoder(family, **options), True), played(decoder(family, **options), False), strict=True):
        assert np.array_equal(slept.tokens, awake.tokens) and np.array_equal(slept.logprobs, awake.logprobs)


def test_a_cache_computed_anew_gives_a_full_forwards_log_probabilities() -> None:
    """on_swap = recompute: nothing is kept, and each log-probability is still exact."""
    subject = decoder("qwen3_moe", recompute_on_swap=True)
    model = tiny("qwen3_moe")
    for prompt, answer in zip(prompts(ROWS), played(subject, True), strict=True):
        assert np.abs(full_logprobs(model, prompt, answer) - answer.logprobs).max() < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_asleep_it_holds_no_more_than_the_rows_in_flight(recompute: bool) -> None:
    """Bytes of weights and cache: all of them, then the keys and values of two rows or none at all, then all again."""
    subject = decoder("qwen3_moe", recompute_on_swap=recompute)
    for i in range(2):
        subject.submit(Request(prompts(1)[0], 30, seed=i))
    for _ in range(4):
        subject.step()
    before, length = bytes_of(subject), int(subject.rows.length[:2].max())
    config = subject.config
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert before == sum(t.size for t in subject.loaded) + 17 * 64 * token
    asleep = Asleep(subject)
    assert bytes_of(subject) == (0 if recompute else 2 * length * token)
    asleep.wake()
    assert bytes_of(subject) == before


@contextlib.asynccontextmanager
async def engine(folder: Path):
    run = run_file(folder)
    files, tensors = weights(run)
    subject = TorchEngine(run)
    await subject.start(files, tensors, VERSION)
    try:
        yield subject
    finally:
        await subject.stop()


async def test_asleep_it_answers_aborts_queues_requests_and_takes_no_version(tmp_path: Path) -> None:
    """What was in flight and what came meanwhile ends after it wakes; an aborted one at once, with what it had."""
    prompt = np.array([3, 9, 12], np.int32)
    async with engine(tmp_path) as subject:
        expected = await subject.generate(Request(prompt, 20, seed=5))
        stream = subject.stream(Request(prompt, 60, seed=1))
        await anext(stream)
        gone, stays = Request(prompt, 60, seed=2), subject.generate(Request(prompt, 50, seed=3))
        going = subject.generate(gone)
        await anext(stream)
        await subject.sleep()
        await subject.sleep()  # again is no harm
        late, tokens = subject.generate(Request(prompt, 20, seed=5)), subject.generated_tokens
        subject.abort([gone.id])
        async with asyncio.timeout(5):
            assert (await going).finish_reason == FINISH_ABORT
        with pytest.raises(Unavailable, match="sleeps"):
            await subject.swap(VERSION, weights(run_file(tmp_path), 1)[1])
        assert not stays.done() and not late.done() and subject.generated_tokens == tokens
        await subject.wake()
        await subject.wake()
        answer = await late
        assert np.array_equal(answer.tokens, expected.tokens) and (await stays).finish_reason == FINISH_LENGTH
        assert [piece async for piece in stream][-1].finish_reason == FINISH_LENGTH


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_that_cannot_sleep_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ends, and who waits for it is told: nobody waits for ever, and the process can end."""
    def fail(decoder: Decoder) -> None:
        raise RuntimeError("no host memory")

    monkeypatch.setattr("services.rollout.torch_engine.Asleep", fail)
    async with engine(tmp_path) as subject:
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="no host memory"):
                await subject.sleep()


async def test_asleep_it_can_be_stopped(tmp_path: Path) -> None:
    """Nobody waits for an engine that ends in its sleep."""
    async with engine(tmp_path) as subject:
        pending = subject.generate(Request(np.array([3, 9], np.int32), 60))
        await subject.sleep()
        await subject.stop()
        assert (await pending).finish_reason == FINISH_ABORT
