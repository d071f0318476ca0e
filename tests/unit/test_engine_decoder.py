"""What a request may expect of the decoder: seeds, stops, limits, refusals, aborts, and weights that change underneath it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.rollout.sampling import uniforms
from slipstream import seeds
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import state
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Span
from tests.engine_models import full_logprobs, prompts, tiny

PROMPT = np.array([5, 9, 2, 30], np.int32)


def decoder(slots: int = 8, **settings: Any) -> Decoder:
    return Decoder(tiny("qwen3_moe"), slots, 48, version=PolicyVersion(number=1, step=0, incarnation=1), **settings)


def weights(seed: int) -> list[RawTensor]:
    return state(tiny("qwen3_moe", seed=seed))


def test_uniforms_are_counter_based() -> None:
    """Golden: the numbers are SplitMix64's, as in slipstream.seeds, so any engine in any language can make them."""
    seed, position = 0xFEEDFACECAFEBEEF, 3
    expected = ((seeds.mix(seeds.mix(seed) + position) >> 32) + 0.5) / 2**32
    assert uniforms(np.array([seed], np.uint64), np.array([position]))[0] == expected
    many = uniforms(np.full(20000, 1, np.uint64), np.arange(20000))
    assert many.min() > 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.01


def test_samples_follow_the_distribution() -> None:
    """The first token of 4,000 seeds has the frequencies that its log-probabilities announce."""
    answers = decoder(512).decode([Request(PROMPT, 1, seed=i) for i in range(4000)])
    counts = np.bincount([a.tokens[0] for a in answers], minlength=67) / len(answers)
    announced = {int(a.tokens[0]): float(np.exp(a.logprobs[0])) for a in answers}
    for token, probability in announced.items():
        assert abs(counts[token] - probability) < 4 * np.sqrt(probability / len(answers)) + 1e-3


def test_a_seed_reproduces_and_another_differs() -> None:
    """The same (weights, prompt, seed) gives the same tokens on another decoder; another seed does not."""
    first, second = (decoder().decode([Request(PROMPT, 20, seed=s) for s in (1, 2)]) for _ in range(2))
    assert [a.tokens.tolist() for a in first] == [a.tokens.tolist() for a in second]
    assert first[0].tokens.tolist() != first[1].tokens.tolist()


def test_a_resumed_answer_goes_on_as_if_nothing_had_happened() -> None:
    """Prompt plus the first 6 tokens, at position 6, continues with exactly the tokens of the uninterrupted run."""
    whole = decoder().decode([Request(PROMPT, 20, seed=3)])[0]
    longer = np.concatenate([PROMPT, whole.tokens[:6]])
    rest = decoder().decode([Request(longer, 14, seed=3, position=6)])[0]
    assert rest.tokens.tolist() == whole.tokens[6:].tolist()


def test_stop_and_length() -> None:
    """A stop token ends the answer and is its last token; else the limit of the call or of the context does."""
    whole = decoder().decode([Request(PROMPT, 20, seed=3)])[0]
    assert (len(whole.tokens), whole.finish_reason) == (20, FINISH_LENGTH)
    stop = int(whole.tokens[7])
    first = whole.tokens.tolist().index(stop)
    stopped = decoder().decode([Request(PROMPT, 20, seed=3, stop_token_ids=(66, stop))])[0]
    assert (stopped.tokens.tolist(), stopped.finish_reason) == (whole.tokens[: first + 1].tolist(), FINISH_STOP)
    full = decoder().decode([Request(PROMPT, 1000, seed=3)])[0]
    assert (len(full.tokens), full.finish_reason) == (48 - len(PROMPT), FINISH_LENGTH)
    inside = decoder().decode([Request(PROMPT, 5, seed=3, stop_token_ids=(int(PROMPT[-1]),))])[0]
    assert len(inside.tokens) >= 1, "a stop token at the end of the prompt stops nothing"


@pytest.mark.parametrize(("reason", "change"), [
    ("EMPTY_PROMPT", dict(prompt=np.zeros(0, np.int32))),
    ("PROMPT_TOO_LONG", dict(prompt=np.ones(48, np.int32))),
    ("TEMPERATURE", dict(temperature=0.0)),
    ("TEMPERATURE", dict(temperature=float("nan"))),
    ("MAX_NEW_TOKENS", dict(max_new_tokens=0)),
    ("TOKEN", dict(prompt=np.array([1, 67], np.int32))),
    ("TOKEN", dict(prompt=np.array([-1], np.int32))),
    ("ROUTES", dict(routes=True)),
])
def test_bad_requests_are_refused(reason: str, change: dict[str, Any]) -> None:
    """Refused before anything runs, by a constant reason."""
    with pytest.raises(InvalidInput) as caught:
        decoder().submit(Request(**{"prompt": PROMPT, "max_new_tokens": 4, **change}))
    assert caught.value.reason == reason


def test_abort_keeps_what_was_generated() -> None:
    """An aborted request returns its tokens so far; its neighbours do not notice; a queued one returns none."""
    subject = decoder(slots=3)
    requests = [Request(p, 12, seed=i) for i, p in enumerate(prompts(4, 1))]
    expected = decoder().decode([Request(r.prompt, 12, seed=r.seed) for r in requests])
    for request in requests:
        subject.submit(request)
    for _ in range(5):
        assert subject.step() == []
    aborted = {r.id: g for r, g in subject.abort([requests[1].id, requests[3].id, 10**9])}
    assert aborted[requests[3].id].tokens.tolist() == []
    partial = aborted[requests[1].id]
    assert (partial.finish_reason, partial.spans) == (FINISH_ABORT, (Span(1, 0, 1, len(partial.tokens)),))
    assert 0 < len(partial.tokens) < 12 and partial.tokens.tolist() == expected[1].tokens[: len(partial.tokens)].tolist()
    done = {}
    while subject.active or subject.waiting:
        done.update((r.id, g) for r, g in subject.step())
    assert [done[requests[i].id].tokens.tolist() for i in (0, 2)] == [expected[i].tokens.tolist() for i in (0, 2)]


def run_with_swap(subject: Decoder, tensors: list[RawTensor], version: PolicyVersion) -> list[tuple[Request, Any]]:
    """Twelve requests on eight slots; the weights change after the fifth step."""
    requests = [Request(p, 14, seed=i) for i, p in enumerate(prompts(12, 2))]
    for request in requests:
        subject.submit(request)
    done = []
    for _ in range(5):
        done += subject.step()
    subject.load(tensors, version)
    while subject.active or subject.waiting:
        done += subject.step()
    assert len(done) == len(requests), "a swap drops nothing"
    return done


def test_swap_in_flight_with_recompute_equals_the_new_weights() -> None:
    """Tokens before the swap match the old weights, tokens after it the new ones, to 1e-5; the spans say where it happened."""
    old, new = tiny("qwen3_moe"), tiny("qwen3_moe", seed=1)
    mixed = 0
    version = PolicyVersion(number=4, step=3, incarnation=1)
    for request, generation in run_with_swap(decoder(recompute_on_swap=True), weights(1), version):
        assert sum(s.length for s in generation.spans) == len(generation.tokens) == 14
        before = sum(s.length for s in generation.spans if s.version == 1)
        assert [s for s in generation.spans if s.version == 4] == [Span(4, 3, 1, 14 - before)]
        mixed += 0 < before < 14
        np.testing.assert_allclose(
            generation.logprobs[:before], full_logprobs(old, request.prompt, generation)[:before], atol=1e-5, rtol=0)
        np.testing.assert_allclose(
            generation.logprobs[before:], full_logprobs(new, request.prompt, generation)[before:], atol=1e-5, rtol=0)
    assert mixed == 8, "the eight rows in flight have both versions"


def test_swap_in_flight_with_kept_cache() -> None:
    """keep: the cache of old weights stays, so rows in flight leave the new weights' distribution; later rows do not."""
    new = tiny("qwen3_moe", seed=1)
    for request, generation in run_with_swap(decoder(), weights(1), PolicyVersion(number=4, step=3)):
        before = sum(s.length for s in generation.spans if s.version == 1)
        gap = np.abs(generation.logprobs[before:] - full_logprobs(new, request.prompt, generation)[before:]).max()
        assert gap > 1e-3 if before else gap < 1e-5


@pytest.mark.parametrize("recompute", [False, True])
def test_reloading_the_same_weights_changes_nothing(recompute: bool) -> None:
    """A -> A: identical tokens, and log-probabilities identical (keep) or equal to rounding (recompute)."""
    undisturbed = {r.seed: g for r, g in run_with_swap(decoder(), weights(0), PolicyVersion(number=1, step=0, incarnation=1))}
    subject = decoder(recompute_on_swap=recompute)
    for request, generation in run_with_swap(subject, weights(0), PolicyVersion(number=2, step=0, incarnation=1)):
        assert generation.tokens.tolist() == undisturbed[request.seed].tokens.tolist()
        np.testing.assert_allclose(
            generation.logprobs, undisturbed[request.seed].logprobs, atol=1e-5 if recompute else 0, rtol=0)


@pytest.mark.parametrize("spoil", ["missing", "extra", "shape", "dtype", "bytes"])
def test_a_swap_that_does_not_fit_leaves_the_old_version_serving(spoil: str) -> None:
    """Whatever is wrong with the tensors: InvalidInput, and the next token comes from the old weights, bit for bit."""
    tensors = weights(1)
    last = tensors[-1]
    tensors = {
        "missing": tensors[:-1],
        "extra": [*tensors, RawTensor("surprise", last.dtype, last.shape, last.data)],
        "shape": [*tensors[:-1], RawTensor(last.name, last.dtype, (2, *last.shape), bytes(last.data) * 2)],
        "dtype": [*tensors[:-1], RawTensor(last.name, "Q9", last.shape, last.data)],
        "bytes": [*tensors[:-1], RawTensor(last.name, last.dtype, last.shape, bytes(last.data)[:-4])],
    }[spoil]
    subject = decoder()
    expected = decoder().decode([Request(PROMPT, 10, seed=1)])[0]
    subject.submit(Request(PROMPT, 10, seed=1))
    done = subject.step()
    with pytest.raises(InvalidInput):
        subject.load(tensors, PolicyVersion(number=9, step=9))
    assert subject.version.number == 1
    while subject.active:
        done += subject.step()
    assert done[0][1].logprobs.tobytes() == expected.logprobs.tobytes()
    assert [s.version for s in done[0][1].spans] == [1]
