"""Guesses learnt from the engine's own answers, on vLLM: what of the contract they leave, and that they are learnt.

What a request's guesses are depends on the answers of others, so a seed's tokens do, too: the parts of the contract that ask a
seed twice are left out. Needs the package arctic-inference; collected for vLLM only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engine import Request
from tests.engines.conftest import CONTEXT, SLOTS, World
from tests.engines.test_contract import (  # noqa: F401 - run on the engine below
    PROMPT,
    TOLERANCE,
    all_of,
    test_greedy_tokens_are_the_most_probable,
    test_log_probabilities_equal_a_full_forward,
    test_no_cached_state_serves_the_next_version,
    test_requests_in_flight_survive_swaps_and_every_span_is_exact,
    test_routes_equal_a_full_forward,
)
from tests.engines.test_vllm_speculation import LOOP, excess
from tests.rollout_runs import run_file

pytest.importorskip("arctic_inference")
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def learning(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """The engine, started with version 1."""
    world = World(run_file(Path(tmp_path_factory.mktemp("engine")), rollout={
        "engine": "vllm", "slots": SLOTS, "context": CONTEXT, "capture_routes": True, "on_swap": "recompute",
        "speculation": {"method": "suffix", "tokens": 8}}))
    await world.engine.start(world.files, world.tensors[1], world.version(1))
    yield world
    await world.engine.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def world(learning: World) -> AsyncIterator[World]:
    """The engine on version 1 with nothing in flight, and left so."""
    if learning.engine.version.number != 1:
        await learning.load(1)
    yield learning
    assert learning.engine.free_slots == SLOTS, "a test left requests in flight"


async def test_an_answer_is_guessed_from_those_before(world: World) -> None:
    """The same greedy answer twice: the second time most of it was guessed, from the first, and it is the same."""
    took, answers = [], []
    for _ in range(2):
        before = world.engine.load.drafts.accepted
        answers.append((await all_of(world, [Request(PROMPT[::-1].copy(), 40, greedy=True)]))[0])
        took.append(world.engine.load.drafts.accepted - before)
    assert answers[0].tokens.tolist() == answers[1].tokens.tolist()
    assert took[1] >= 20 and took[1] > took[0]


async def test_learnt_guesses_are_drawn_from_the_policy(world: World) -> None:
    """Answers of a group, each guessed from those before: nothing is drawn more or less often for it; log-probabilities are a
    forward's."""
    before = world.engine.load.drafts.accepted
    answers = await all_of(world, [Request(LOOP, 32, seed=i, temperature=0.8) for i in range(250)])
    assert world.engine.load.drafts.accepted - before > 150
    assert np.abs(excess(world, answers, LOOP, 0.8)).max() < 4.5
    assert max(world.gaps(LOOP, answer, 0.8).max() for answer in answers) <= TOLERANCE
