"""What every engine promises of its sleep. On a CPU vLLM keeps its memory; what becomes of requests is the same as on a GPU."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.rollout.engine import Request
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, Span
from tests.engines.conftest import World
from tests.engines.test_contract import PROMPT, TOLERANCE, free, prompts

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_requests_sleep_and_go_on(world: World) -> None:
    """Twelve answers in flight through two naps, one that comes in the second and one that is aborted in it: none is lost, no
    token is sampled meanwhile, and every log-probability is a full forward's."""
    engine = world.engine
    requests = [Request(p, 60, seed=i, routes=True) for i, p in enumerate(prompts(12))]
    answers = [engine.generate(request) for request in requests]
    gone = Request(PROMPT, 100, seed=99)
    going = engine.generate(gone)
    late, tokens = None, 0
    async with contextlib.aclosing(engine.stream(Request(PROMPT, 60, seed=7))) as stream:
        for nap in range(2):
            for _ in range(4):  # some steps have gone by
                await anext(stream)
            await engine.sleep()
            tokens = engine.generated_tokens
            if nap:
                late = engine.generate(Request(PROMPT, 5, seed=1))
                engine.abort([gone.id])
                async with asyncio.timeout(10):
                    aborted = await going
                assert aborted.finish_reason == FINISH_ABORT and world.gaps(PROMPT, aborted).max() <= TOLERANCE
            await asyncio.sleep(0.2)
            assert engine.generated_tokens == tokens and engine.version.number == 1
            await engine.wake()
    assert late is not None and (await late).spans == (Span(1, 0, 1, 5),)
    for request, future in zip(requests, answers, strict=True):
        answer = await future
        assert len(answer.tokens) == 60 and answer.finish_reason == FINISH_LENGTH
        assert world.gaps(request.prompt, answer).max() <= TOLERANCE
        assert answer.routes is not None and len(answer.routes) == len(request.prompt) + 59
    await free(world)


async def test_a_version_is_loaded_after_a_nap(world: World) -> None:
    """What wakes is an engine like any other."""
    await world.engine.sleep()
    await world.engine.wake()
    await world.load(2)
    answer = await world.engine.generate(Request(PROMPT, 8, seed=1))
    assert answer.spans == (Span(2, 1, 1, 8),) and world.gaps(PROMPT, answer).max() <= TOLERANCE
