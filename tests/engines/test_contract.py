"""What every engine promises. The oracle is transformers' own forward pass, with the weights that a span names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engine import Generation, Request
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Span
from tests.engines.conftest import CONTEXT, SLOTS, World

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOLERANCE = 1e-5
PROMPT = np.array([3, 9, 12], np.int32)
LONG = (np.arange(70, dtype=np.int32) * 7 % 29 + 2).astype(np.int32)  # more than two blocks of any engine's cache


def prompts(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [generator.integers(2, 30, size).astype(np.int32) for size in generator.integers(1, 20, count)]


async def all_of(world: World, requests: list[Request]) -> list[Generation]:
    return list(await asyncio.gather(*(world.engine.generate(request) for request in requests)))


def same(a: Generation, b: Generation) -> bool:
    return a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tobytes() == b.logprobs.tobytes()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probabilities_equal_a_full_forward(world: World, temperature: float) -> None:
    """Each sampled token's is that of softmax(logits / T) over the whole vocabulary, to 1e-5 in fp32."""
    requests = [Request(p, 16, seed=i, temperature=temperature) for i, p in enumerate(prompts(6) * 3)]
    for request, answer in zip(requests, await all_of(world, requests), strict=True):
        assert answer.spans == (Span(1, 0, 1, 16),) and answer.finish_reason == FINISH_LENGTH
        assert world.gaps(request.prompt, answer, temperature).max() <= TOLERANCE


async def test_greedy_tokens_are_the_most_probable(world: World) -> None:
    """A ragged batch of greedy requests takes the argmax of the forward pass at every position."""
    requests = [Request(p, 20, greedy=True) for p in prompts(11)]
    for request, answer in zip(requests, await all_of(world, requests), strict=True):
        logits, _ = world.forward(1, request.prompt, answer.tokens)
        assert answer.tokens.tolist() == logits.argmax(-1).tolist()
        assert world.gaps(request.prompt, answer).max() <= TOLERANCE


async def test_sampling_follows_the_distribution(world: World) -> None:
    """The first token of 600 seeds: its frequencies are the forward's probabilities, by a chi-squared test."""
    answers = await all_of(world, [Request(PROMPT, 1, seed=1000 + i) for i in range(600)])
    logits, _ = world.forward(1, PROMPT, answers[0].tokens)
    expected = torch.softmax(logits[0].double(), -1).numpy() * 600
    seen = np.bincount([int(a.tokens[0]) for a in answers], minlength=len(expected))
    often = expected >= 5
    pairs = [(seen[often], expected[often]), (seen[~often].sum(keepdims=True), expected[~often].sum(keepdims=True))]
    chi2 = sum(float(((s - e) ** 2 / np.maximum(e, 1e-9)).sum()) for s, e in pairs)
    assert chi2 < often.sum() + 5 * np.sqrt(2 * often.sum())


async def test_a_seed_gives_the_same_answer_in_any_company(world: World) -> None:
    """Alone, in a crowd and beside greedy requests: the same tokens. Another seed or another position: others."""
    alone = (await all_of(world, [Request(PROMPT, 24, seed=7)]))[0]
    crowd = [Request(p, 30, seed=100 + i, greedy=i % 3 == 0) for i, p in enumerate(prompts(13))]
    among = (await all_of(world, [*crowd[:6], Request(PROMPT, 24, seed=7), *crowd[6:]]))[6]
    assert among.tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=TOLERANCE, rtol=0)
    largest, other, later = await all_of(
        world, [Request(PROMPT, 24, seed=2**64 - 1), Request(PROMPT, 24, seed=8), Request(PROMPT, 24, seed=7, position=24)])
    assert len({tuple(a.tokens.tolist()) for a in (alone, largest, other, later)}) == 4


async def test_stop_length_and_context_end_an_answer(world: World) -> None:
    """A stop token is the last one and kept; without it an answer ends at its length, or where the context is full."""
    whole = (await all_of(world, [Request(PROMPT, 30, seed=3)]))[0]
    stop = int(whole.tokens[4])
    first = whole.tokens.tolist().index(stop)
    stopped, short, full = await all_of(world, [
        Request(PROMPT, 30, seed=3, stop_token_ids=(stop,)), Request(PROMPT, 1, seed=3), Request(LONG, 500, seed=3)])
    assert stopped.tokens.tolist() == whole.tokens[: first + 1].tolist() and stopped.finish_reason == FINISH_STOP
    assert short.tokens.tolist() == whole.tokens[:1].tolist() and short.finish_reason == FINISH_LENGTH
    assert len(full.tokens) == CONTEXT - len(LONG) and full.finish_reason == FINISH_LENGTH
    assert world.engine.stop_token_ids == (1,)


async def test_a_stream_adds_up_to_the_answer(world: World) -> None:
    """Its pieces are the future's tokens, log-probabilities and spans; finish reason and routes come with the last."""
    before = world.engine.generated_tokens
    whole = (await all_of(world, [Request(PROMPT, 30, seed=4, routes=True)]))[0]
    pieces = [piece async for piece in world.engine.stream(Request(PROMPT, 30, seed=4, routes=True))]
    assert np.concatenate([p.tokens for p in pieces]).tolist() == whole.tokens.tolist()
    np.testing.assert_allclose(np.concatenate([p.logprobs for p in pieces]), whole.logprobs, atol=TOLERANCE, rtol=0)
    assert sum(s.length for p in pieces for s in p.spans) == 30 and whole.spans == (Span(1, 0, 1, 30),)
    assert [p.finish_reason for p in pieces] == [0] * (len(pieces) - 1) + [FINISH_LENGTH] and len(pieces) > 1
    assert np.array_equal(pieces[-1].routes, whole.routes)  # pyright: ignore[reportArgumentType]
    assert world.engine.generated_tokens == before + 60


async def test_an_abort_gives_what_there_is(world: World) -> None:
    """Partial tokens are the beginning of the whole answer, with log-probabilities; others run on; slots are free again."""
    whole = (await all_of(world, [Request(PROMPT, 100, seed=5, routes=True)]))[0]
    request, rest, given_up = Request(PROMPT, 100, seed=5, routes=True), Request(PROMPT, 20, seed=6), Request(PROMPT, 100)
    partial, finished, cancelled = (world.engine.generate(r) for r in (request, rest, given_up))
    async with contextlib.aclosing(world.engine.stream(Request(PROMPT, 100, seed=5))) as stream:
        for _ in range(3):
            await anext(stream)
    world.engine.abort([request.id, 10**9])
    cancelled.cancel()
    answer = await partial
    assert answer.finish_reason == FINISH_ABORT and 0 < len(answer.tokens) < 100
    assert answer.tokens.tolist() == whole.tokens[: len(answer.tokens)].tolist()
    assert world.gaps(PROMPT, answer).max() <= TOLERANCE
    assert answer.routes is not None and len(answer.routes) == len(PROMPT) + len(answer.tokens) - 1
    assert len((await finished).tokens) == 20
    await free(world)


async def free(world: World) -> None:
    """Until no request is in flight."""
    async with asyncio.timeout(20):
        while world.engine.free_slots != SLOTS:
            await asyncio.wait_for(world.engine.generate(Request(PROMPT, 1)), 20)


async def test_routes_equal_a_full_forward(world: World) -> None:
    """[P+n-1, L, K] over prompt and answer, also for the samples of a group, whose prompt the engine computes once."""
    requests = [Request(p, 12, seed=i, routes=True) for i, p in enumerate([*prompts(5), LONG])]
    answers = await all_of(world, requests)
    group = [Request(LONG, 12, seed=50 + i, routes=True) for i in range(4)]
    for request, answer in zip([*requests, *group], [*answers, *await all_of(world, group)], strict=True):
        _, routes = world.forward(1, request.prompt, answer.tokens)
        assert answer.routes is not None and answer.routes.shape == routes.shape
        assert np.array_equal(np.sort(answer.routes, -1), np.sort(routes, -1))


async def test_back_to_a_version_is_bit_for_bit(world: World) -> None:
    """A, B, A: the same request gives the same bits again, and B gave others. Loading A over A changes nothing either."""
    ask = [Request(p, 20, seed=i, greedy=i % 2 == 0) for i, p in enumerate(prompts(4))]
    first = await alone(world, ask)
    await world.load(2)
    between = await alone(world, ask)
    await world.load(1)
    again = await alone(world, ask)
    await world.load(1)
    twice = await alone(world, ask)
    for a, b, c, d in zip(first, between, again, twice, strict=True):
        assert same(a, c) and same(a, d)
        assert abs(a.logprobs - b.logprobs).max() > 0.1
    assert {s.version for a in between for s in a.spans} == {2}


async def alone(world: World, requests: list[Request]) -> list[Generation]:
    """One after the other, so that no batch mate moves a last bit."""
    return [(await all_of(world, [Request(r.prompt, r.max_new_tokens, seed=r.seed, greedy=r.greedy)]))[0] for r in requests]


def without_last(tensors: list[RawTensor]) -> list[RawTensor]:
    return tensors[:-1]


def with_stranger(tensors: list[RawTensor]) -> list[RawTensor]:
    return [*tensors, RawTensor("model.layers.9.stranger", "F32", (1,), bytes(4))]


def reshaped(tensors: list[RawTensor]) -> list[RawTensor]:
    last = tensors[-1]
    return [*tensors[:-1], RawTensor(last.name, last.dtype, (last.shape[0] // 2, *last.shape[1:]), last.data[: last.size // 2])]


def truncated(tensors: list[RawTensor]) -> list[RawTensor]:
    last = tensors[-1]
    return [*tensors[:-1], RawTensor(last.name, last.dtype, last.shape, last.data[:-8])]


@pytest.mark.parametrize("spoil", [without_last, with_stranger, reshaped, truncated])
async def test_a_version_that_does_not_fit_leaves_the_old_one(world: World, spoil: Callable[..., Any]) -> None:
    """The swap is refused by name, requests in flight do not notice, and the old version gives the same bits as before."""
    before = (await all_of(world, [Request(PROMPT, 10, seed=1)]))[0]
    flying = world.engine.generate(Request(PROMPT, 60, seed=2))
    with pytest.raises(InvalidInput):
        await world.engine.swap(world.version(3), spoil(world.tensors[2]))
    assert (await flying).spans == (Span(1, 0, 1, 60),)
    after = (await all_of(world, [Request(PROMPT, 10, seed=1)]))[0]
    assert same(before, after) and world.engine.version.number == 1


async def test_requests_in_flight_survive_swaps_and_every_span_is_exact(world: World) -> None:
    """Twelve answers through three swaps: none is lost, each token's log-probability is a full forward's of the version that
    its span names, to 1e-5, so no span is off by one and no cached state crossed a swap."""
    requests = [Request(p, 100, seed=i, routes=True) for i, p in enumerate(prompts(12))]
    answers = [world.engine.generate(request) for request in requests]
    for number in (2, 1, 2):
        async with contextlib.aclosing(world.engine.stream(Request(PROMPT, 40, seed=number))) as stream:
            for _ in range(4):  # some steps have gone by
                await anext(stream)
        await world.load(number)
    after = world.engine.generate(Request(PROMPT, 5, seed=1))
    assert (await after).spans == (Span(2, 1, 1, 5),)
    crossed = 0
    for request, future in zip(requests, answers, strict=True):
        answer = await future
        assert len(answer.tokens) == 100 and answer.finish_reason == FINISH_LENGTH
        assert sum(span.length for span in answer.spans) == 100
        assert all(a.version != b.version for a, b in zip(answer.spans, answer.spans[1:], strict=False))
        crossed += len(answer.spans) > 1
        assert world.gaps(request.prompt, answer).max() <= TOLERANCE
        assert answer.routes is not None and len(answer.routes) == len(request.prompt) + 99
    assert crossed >= 6


async def test_no_cached_state_serves_the_next_version(world: World) -> None:
    """A prompt of several blocks, asked again after a swap: nothing of the old version's cache is in the answer."""
    await all_of(world, [Request(LONG, 8, seed=1), Request(LONG, 8, seed=2)])
    await world.load(2)
    answer = (await all_of(world, [Request(LONG, 8, seed=1)]))[0]
    assert answer.spans == (Span(2, 1, 1, 8),) and world.gaps(LONG, answer).max() <= TOLERANCE


@pytest.mark.parametrize("field, bad", [
    ("prompt", Request(PROMPT[:0], 3)), ("prompt", Request(np.ones(CONTEXT, np.int32), 3)),
    ("prompt", Request(np.array([10**6], np.int32), 3)), ("temperature", Request(PROMPT, 3, temperature=0)),
    ("max_new_tokens", Request(PROMPT, 0))])
async def test_what_can_never_run_is_refused_by_name(world: World, field: str, bad: Request) -> None:
    """At the call, before anything is queued."""
    with pytest.raises(InvalidInput, match=field):
        world.engine.generate(bad)
