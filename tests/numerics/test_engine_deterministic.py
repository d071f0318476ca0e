"""Deterministic decoding: a request's tokens, log-probabilities and routes are the same bits whoever runs beside it, and when.
"""

from __future__ import annotations

import numpy as np
import pytest

from services.rollout.decoder import WIDTH, Decoder
from services.rollout.engine import Generation, Request
from slipstream.errors import InvalidInput
from tests.engine_models import prompts, tiny

pytestmark = pytest.mark.slow

SLOTS = WIDTH + 6  # so that a step takes more than one pass


def decoder(family: str = "qwen3_moe") -> Decoder:
    return Decoder(tiny(family, experts="dense"), SLOTS, 48, deterministic=True, capture_routes=family != "llama")


def probe(size: int, capture: bool) -> Request:
    """From 1, 11 or 17 prompt tokens on, the 20 new ones cross the lengths 16 and 32 at which the shape of a pass changes."""
    return Request(np.arange(7, 7 + size, dtype=np.int32), 20, seed=size, stop_token_ids=(3,), routes=capture)


def mates(count: int, seed: int) -> list[Request]:
    sizes = np.random.default_rng(seed).integers(1, 24, count)
    return [Request(p, int(n), seed=seed * 1000 + i) for i, (p, n) in enumerate(zip(prompts(count, seed), sizes, strict=True))]


def same(a: Generation, b: Generation) -> bool:
    routes = a.routes is None or np.array_equal(a.routes, b.routes)  # pyright: ignore
    return np.array_equal(a.tokens, b.tokens) and a.logprobs.tobytes() == b.logprobs.tobytes() and routes


@pytest.mark.parametrize("family", [
    "qwen3_moe", "llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "olmoe", "deepseek_v3"))])
def test_batch_mates_slot_and_time_do_not_matter(family: str) -> None:
    """Alone; among mates, first or last; in a crowd that queues for slots; joining late: bitwise the same."""
    capture, subject = family != "llama", decoder(family)
    places = {1: 0, 11: 9, 17: WIDTH + 2}
    alone = {size: subject.decode([probe(size, capture)])[0] for size in places}
    for seed in (1, 2):
        crowd, probes = mates(SLOTS + 20, seed), {size: probe(size, capture) for size in places}
        for size, place in places.items():
            crowd.insert(place // seed, probes[size])
        answers = {r.id: answer for r, answer in zip(crowd, subject.decode(crowd), strict=True)}
        assert all(same(answers[probes[size].id], alone[size]) for size in places)
    for mate in mates(20, 4):
        subject.submit(mate)
    for _ in range(7):
        subject.step()
    late = [probe(size, capture) for size in places]
    for answer, size in zip(subject.decode(late), places, strict=True):
        assert same(answer, alone[size])


def test_members_of_a_group_equal_single_requests() -> None:
    """A prompt computed once for eight samples gives each the bits it gets when asked for alone."""
    subject = decoder()
    group = [Request(prompts(1)[0], 20, seed=i, routes=True) for i in range(8)]
    together = subject.decode(group)
    for request, generation in zip(group, together, strict=True):
        again = Request(request.prompt, 20, seed=request.seed, routes=True)
        assert same(subject.decode([again])[0], generation)


def test_the_number_of_slots_does_not_matter() -> None:
    """Workers with different slots give the same bits: the width of a pass is a constant, not a setting."""
    small, large = (Decoder(tiny("qwen3_moe", experts="dense"), slots, 48, deterministic=True) for slots in (5, 200))
    for a, b in zip(small.decode(mates(30, 6)), large.decode(mates(30, 6)), strict=True):
        assert same(a, b)


def test_kernels_that_depend_on_the_batch_are_refused() -> None:
    """Deterministic decoding asks for dense experts and says so."""
    with pytest.raises(InvalidInput, match="experts = 'dense'"):
        Decoder(tiny("qwen3_moe"), 8, 32, deterministic=True)
