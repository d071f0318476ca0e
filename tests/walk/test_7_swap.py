"""Hop 7: the circle closes. A rollout worker fetches the new version, verifies it, and swaps it in beneath its answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine import Request
from slipstream.errors import InvalidInput
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import Span
from tests.walk.conftest import Pace
from tests.walk.hops import Walk, fetch, lease, publish, roll_out, up_to_batch

PROMPT = np.array([3, 9, 12], np.int32)
NEW_TOKENS = 40


async def second_version(walk: Walk) -> PolicyVersion:
    """Hops 1 to 5, once."""
    walk.learner.step((await up_to_batch(walk, 1)).groups, 1)
    return await publish(walk, 1)


async def test_a_swap_in_the_middle_of_an_answer(walk: Walk, pace: Pace) -> None:
    """The engine swaps between two tokens. The answer in flight is neither lost nor begun again: what the old version said
    stays, the new one goes on from there, and the spans say who chose which token."""
    old = await walk.engine.generate(Request(PROMPT, NEW_TOKENS, seed=7))
    version = await second_version(walk)
    tensors = await fetch(walk, version)
    pace.hold_after(steps=3)
    answer = walk.engine.generate(Request(PROMPT, NEW_TOKENS, seed=7))
    await pace.held()
    swap = asyncio.create_task(walk.engine.swap(version, tensors))
    for _ in range(2):  # turns of the event loop: one to call `swap`, one in which the engine is handed what was gathered
        await asyncio.sleep(0)
    pace.go_on()
    await swap
    mixed = await answer
    assert mixed.spans == (Span(1, 0, 1, 4), Span(2, 1, 1, 36))  # the first step samples two: one ends the prompt pass
    assert mixed.tokens[:4].tolist() == old.tokens[:4].tolist()
    np.testing.assert_allclose(mixed.logprobs[:4], old.logprobs[:4], atol=1e-6)
    assert np.abs(mixed.logprobs[4] - old.logprobs[4]) > 1e-4


async def test_a_damaged_version_is_never_loaded(walk: Walk, tmp_path: Path) -> None:
    """One bit of one tensor is wrong: fetching raises and names it, long before the engine would have stopped for a swap."""
    before = await walk.engine.generate(Request(PROMPT, NEW_TOKENS, seed=7))
    version = await second_version(walk)
    path = tmp_path / "objects" / "versions" / "00000002-1" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"version 2: tensor \S+ \(versions/00000002-1/model.safetensors, .* is damaged"):
        await fetch(walk, version)
    after = await walk.engine.generate(Request(PROMPT, NEW_TOKENS, seed=7))
    assert after.spans == before.spans == (Span(1, 0, 1, NEW_TOKENS),)
    assert after.logprobs.tobytes() == before.logprobs.tobytes()


async def test_the_next_samples_are_the_new_versions(walk: Walk) -> None:
    """And so round again: the publication gave room for four more draws, their leases ask for step 1, and what comes
    back is made by weights that the first four have changed."""
    version = await second_version(walk)
    leases = await lease(walk)
    assert {s.min_step for s in leases} == {version.step}
    await walk.engine.swap(version, await fetch(walk, version))
    samples = await roll_out(walk, leases)
    assert {(s.oldest_step, s.newest_step) for s in samples} == {(1, 1)}
    assert {result.status.code for result in (await walk.buffer.submit(*samples)).results} == {0}
