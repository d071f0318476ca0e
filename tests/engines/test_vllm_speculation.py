"""Guessed tokens on vLLM: the whole contract once more, with an engine that guesses wherever it can, and what is special to it.

Guesses are what followed the sequence's last token when that came before, so nearly every step judges some, and rejects most:
the weights are random. Collected for vLLM only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engine import Generation, Request
from slipstream.sample import FINISH_LENGTH, FINISH_STOP, Span
from tests.engines.conftest import CONTEXT, SLOTS, World
from tests.engines.test_contract import *  # noqa: F403 - its tests, on the engine below
from tests.engines.test_contract import LONG, PROMPT, TOLERANCE, all_of, same
from tests.rollout_runs import run_file

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 4
LOOP = np.array([3, 9, 12, 5] * 3, np.int32)  # its last token came before


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guessing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The engine, started with version 1."""
    world = World(run_file(Path(tmp_path_factory.mktemp("engine")), rollout={
        "engine": "vllm", "slots": SLOTS, "context": CONTEXT, "capture_routes": True, "on_swap": "recompute",
        "speculation": {"method": "ngram", "tokens": TOKENS, "prompt_lookup_min": 1}}))
    world.engine.extension = "tests.engines.faulty_worker.FaultyExtension"
    await world.engine.start(world.files, world.tensors[1], world.version(1))
    yield world
    await world.engine.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def world(guessing: World) -> AsyncIterator[World]:
    """The engine on version 1 with nothing in flight, and left so."""
    if guessing.engine.version.number != 1:
        await guessing.load(1)
    yield guessing
    assert guessing.engine.free_slots == SLOTS, "a test left requests in flight"


def guess(tokens: list[int]) -> int:
    """The first guessed token after these, what followed the earliest of the longest matches of at most 4; -1 for none."""
    for size in range(min(4, len(tokens) - 1), 0, -1):
        end = tokens[-size:]
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == end:
                return tokens[start + size]
    return -1


def excess(world: World, answers: list[Generation], prompt: np.ndarray, temperature: float) -> np.ndarray:
    """Of each token of the vocabulary, and last of "the guess came true": how often it came more than the forward's
    probabilities add up to, in standard deviations. What is named by the tokens before, as a guess is, has mean 0."""
    found, variance = np.zeros(0), np.zeros(0)
    for answer in answers:
        logits, _ = world.forward(1, prompt, answer.tokens)
        chances = (logits.double() / temperature).softmax(-1).numpy()
        whole, ahead = np.concatenate([prompt, answer.tokens]).tolist(), np.zeros((len(chances), 1))
        came = np.zeros((len(chances), chances.shape[1] + 1))
        for t, token in enumerate(answer.tokens):
            came[t, token] = 1
            if (guessed := guess(whole[: len(prompt) + t])) >= 0:
                ahead[t], came[t, -1] = chances[t, guessed], token == guessed
        chances = np.concatenate([chances, ahead], 1)
        if not len(found):
            found, variance = np.zeros(chances.shape[1]), np.full(chances.shape[1], 0.1)
        found += (came - chances).sum(0)
        variance += (chances * (1 - chances)).sum(0)
    return found / np.sqrt(variance)


async def test_guessed_tokens_are_drawn_from_the_policy(world: World) -> None:
    """Nothing is drawn more or less often for having been guessed: over 8,000 tokens, at temperature 0.8, to 4.5 deviations."""
    before, requests = world.engine.load.drafts, [Request(LOOP, 32, seed=i, temperature=0.8) for i in range(250)]
    answers, drafts = await all_of(world, requests), world.engine.load.drafts
    assert drafts.made - before.made > 3000 and drafts.accepted - before.accepted > 150
    assert np.abs(excess(world, answers, LOOP, 0.8)).max() < 4.5


async def test_without_the_mend_guesses_are_judged_at_any_temperature(world: World) -> None:
    """The fault that `vllm_temperatures` is for: log-probabilities that are no forward's, and no error. The engine would not
    have started: its proof says so. When the first half fails, vLLM has mended itself: remove the file."""
    requests = [Request(LOOP, 20, seed=i, temperature=0.5 + i / 10) for i in range(12)]
    before = await all_of(world, requests)
    vllm = world.engine._vllm
    try:
        assert await vllm.call("slipstream_mend_temperatures", False) == [False]
        with pytest.raises(Exception, match=r"rollout\.speculation: this vLLM spreads the temperatures"):
            await vllm.call("slipstream_prove_temperatures")
        wrong = await all_of(world, requests)
        assert not all(world.gaps(LOOP, a, r.temperature).max() < 0.1 for r, a in zip(requests, wrong, strict=True))
    finally:
        assert await vllm.call("slipstream_mend_temperatures", True) == [True]
    assert await vllm.call("slipstream_prove_temperatures") == [None]
    for request, answer, first in zip(requests, await all_of(world, requests), before, strict=True):
        assert answer.tokens.tolist() == first.tokens.tolist()
        assert world.gaps(LOOP, answer, request.temperature).max() <= TOLERANCE


async def test_a_first_step_of_one_token_is_not_filled_with_guesses(world: World) -> None:
    """A prompt of one token, and one that is in the cache but for its last token, while others run: vLLM would fill that step
    with guesses of token -1. The same tokens as alone, and a forward's log-probabilities."""
    prompts = [LOOP[:1], np.concatenate([LONG[:64], LOOP[:1]])]
    requests = [Request(prompt, 6, seed=i) for i in range(20) for prompt in prompts]
    alone = [(await all_of(world, [request]))[0] for request in requests[:6]]
    running = [world.engine.generate(Request(LOOP, 100, seed=i)) for i in range(3)]
    answers = []
    for first in range(0, len(requests), 10):
        answers += await all_of(world, [Request(r.prompt, 6, seed=r.seed) for r in requests[first : first + 10]])
    for future in running:
        assert len((await future).tokens) == 100
    for request, answer in zip(requests, answers, strict=True):
        assert world.gaps(request.prompt, answer).max() <= TOLERANCE
    assert [a.tokens.tolist() for a in answers[:6]] == [a.tokens.tolist() for a in alone]


async def test_each_step_gives_one_token_and_those_accepted(world: World) -> None:
    """A request alone: what its tokens are more than its steps was guessed and accepted, and counted so."""
    signals, before = world.engine.signals, world.engine.load.drafts
    steps = signals.steps
    answer = (await all_of(world, [Request(LOOP, 60, seed=11, temperature=0.3)]))[0]
    after, steps = world.engine.load.drafts, signals.steps - steps
    accepted = after.accepted - before.accepted
    assert len(answer.tokens) == 60 and accepted > 0
    assert 60 <= steps + accepted <= 60 + TOKENS  # the last step's may be cut
    assert after.made - before.made <= steps and accepted <= after.tokens - before.tokens <= TOKENS * steps


async def test_what_ends_an_answer_among_accepted_guesses_cuts_the_rest(world: World) -> None:
    """A prompt from which the model goes round in circles: the second step accepts four guesses. The stop token is the first of
    them, and is the last of the answer; so is the third where three are the most. What is behind leaves nothing."""
    start = np.random.default_rng(1).integers(2, 30, 5).astype(np.int32)
    circles = (await all_of(world, [Request(start, 40, greedy=True)]))[0].tokens
    prompt = np.concatenate([start, circles[:30]])
    tokens = circles[30:].tolist()
    assert tokens[:2] * 5 == tokens and tokens[0] != tokens[1]
    for request, size, finish in (
        (Request(prompt, 30, greedy=True, stop_token_ids=(tokens[1],), routes=True), 2, FINISH_STOP),
        (Request(prompt, 3, greedy=True, routes=True), 3, FINISH_LENGTH),
    ):
        before = world.engine.load.drafts.accepted
        answer = (await all_of(world, [request]))[0]
        assert world.engine.load.drafts.accepted - before == TOKENS  # judged in one step, most of them beyond the end
        assert answer.tokens.tolist() == tokens[:size] and answer.finish_reason == finish
        assert answer.spans == (Span(1, 0, 1, size),) and world.gaps(prompt, answer).max() <= TOLERANCE
        _, routes = world.forward(1, prompt, answer.tokens)
        assert answer.routes is not None and np.array_equal(np.sort(answer.routes, -1), np.sort(routes, -1))


async def test_rows_of_rejected_guesses_are_nobodys(world: World) -> None:
    """Routes of answers that crossed swaps, and were computed anew each time: each token's are those of a forward by the
    version that drew the next one."""
    requests = [Request(LOOP, 90, seed=i, routes=True) for i in range(12)]
    answers = [world.engine.generate(request) for request in requests]
    for number in (2, 1):
        async for _ in world.engine.stream(Request(PROMPT, 25, seed=number)):
            pass
        await world.load(number)
    crossed = 0
    for future in answers:
        answer = await future
        assert answer.routes is not None and world.gaps(LOOP, answer).max() <= TOLERANCE
        start = 0
        for span in answer.spans:
            _, routes = world.forward(span.version, LOOP, answer.tokens)
            own = slice(len(LOOP) + start - 1 if start else 0, len(LOOP) + start + span.length - 1)
            assert np.array_equal(np.sort(answer.routes[own], -1), np.sort(routes[own], -1))
            start += span.length
        crossed += len(answer.spans) > 1
    assert crossed >= 6


async def test_a_guess_is_judged_the_same_alone_and_in_company(world: World) -> None:
    """A request's guesses come from its own tokens, so its draws are its seed's: the same tokens alone, among twelve, again."""
    requests = [Request(LOOP, 50, seed=i, temperature=0.5) for i in range(12)]
    together, again = await all_of(world, requests), await all_of(world, [*requests][::-1])
    alone = [(await all_of(world, [request]))[0] for request in requests[:3]]
    assert [a.tokens.tolist() for a in together] == [a.tokens.tolist() for a in again[::-1]]
    assert [a.tokens.tolist() for a in together[:3]] == [a.tokens.tolist() for a in alone]
    assert same(alone[0], (await all_of(world, requests[:1]))[0])
