"""Hop 2: the sample is played. An environment observes and judges, the engine answers; what is submitted are tokens."""

from __future__ import annotations

import numpy as np
from google.rpc import code_pb2

from slipstream import sample
from slipstream.environment import Task
from slipstream.environments.sort_digits import SortDigits
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1.sample_pb2 import Transcript
from tests.walk.hops import Walk, lease, roll_out


async def test_a_sample_is_the_tokens_that_were_seen_and_sampled(walk: Walk) -> None:
    """Nothing is ever tokenised again: prompt and answer stay the ids that the model saw and chose; a mask tells them apart.
    Each generated token carries its log-probability and the policy version that chose it."""
    leases = await lease(walk)
    samples = await roll_out(walk, leases)
    for leased, submitted in zip(leases, samples, strict=True):
        [segment] = sample.decode(submitted.body).segments
        question = SortDigits(2, 2).reset(Task(leased.task.index, leased.task.seed)).text
        prompt = walk.engine.tokenizer.encode(question, add_special_tokens=False)
        assert segment.tokens[:3].tolist() == prompt and segment.loss_mask.tolist()[:3] == [False] * 3
        generated = len(segment.tokens) - 3
        assert segment.loss_mask[3:].all() and 1 <= generated <= 3
        assert segment.logprobs.shape == (generated,) and (segment.logprobs <= 0).all()
        assert segment.spans == (sample.Span(version=1, step=0, incarnation=1, length=generated),)


async def test_an_answer_is_judged_by_the_environment_or_left_to_a_scorer(walk: Walk) -> None:
    """sort-digits knows that an answer which never stops is wrong: such a sample arrives with its score. Every other one has a
    transcript: what was asked, what was said, what is right, and who shall judge."""
    samples = await roll_out(walk, await lease(walk))
    assert len({s.HasField("score") for s in samples}) == 2
    for submitted in samples:
        played = sample.decode(submitted.body)
        if played.finish_reason == sample.FINISH_LENGTH:
            assert submitted.score.scalar == 0 and submitted.score.components == {"truncated": 1} and not submitted.transcript
            continue
        said = walk.engine.tokenizer.decode(played.segments[0].tokens[3:], skip_special_tokens=True)
        transcript = Transcript.FromString(submitted.transcript)
        assert (transcript.response, transcript.scorer) == (said, "exact")
        assert transcript.answer == "".join(sorted(transcript.prompt.rstrip("=")))


async def test_submitting_twice_is_submitting_once(walk: Walk) -> None:
    """An acknowledgement means that the sample is durable. When it is lost the worker just says it again; only another body for
    the same attempt is refused, because then somebody has made a mistake."""
    first, *_ = await roll_out(walk, await lease(walk))
    for _ in range(2):
        [result] = (await walk.buffer.submit(first)).results
        assert (result.status.code, result.outcome) == (code_pb2.OK, samples_pb2.OUTCOME_ACCEPTED)
    other = sample.decode(first.body)
    other.segments[0].logprobs = other.segments[0].logprobs - np.float32(1)
    first.body = sample.encode(other)
    first.crc32c = sample.crc32c(first.body)
    [result] = (await walk.buffer.submit(first)).results
    assert result.status.code == code_pb2.ALREADY_EXISTS
