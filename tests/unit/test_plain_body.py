"""The shortcuts for plain bodies write, bit for bit, what slipstream.sample.encode writes, and read what messages would say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.codec import Codec
from services.rollout.engine import Generation
from services.rollout.episode import Episode
from slipstream import plain_body
from slipstream.environment import Reset, Step
from slipstream.model import character_tokenizer
from slipstream.protos.buffer.v1.samples_pb2 import SampleLease
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Sample, Segment, Span, decode, encode


def spans(*lengths: int) -> tuple[Span, ...]:
    return tuple(Span(version * 300, version * 299, 1 + version, n) for version, n in enumerate(lengths))


@pytest.mark.parametrize("prompt", [0, 1, 9, 31, 32, 127, 128, 20_000])
@pytest.mark.parametrize("lengths", [(1,), (6,), (3, 130), (1, 2, 3), (40_000,)])
@pytest.mark.parametrize("reason", [0, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT])
def test_the_bytes_are_those_of_the_message(prompt: int, lengths: tuple[int, ...], reason: int) -> None:
    """Whatever the lengths: numbers of one byte and of three, one version and several, one of step 0 among them."""
    random, new = np.random.default_rng(prompt), sum(lengths)
    context, answer = (random.integers(0, 1 << 31, n).astype(np.int32) for n in (prompt, new))
    logprobs = -random.random(new).astype(np.float32)
    segment = Segment(np.concatenate([context, answer]), np.arange(prompt + new) >= prompt, logprobs, spans(*lengths))
    body = encode(Sample([segment], reason))
    assert plain_body.encode(context, answer, logprobs, spans(*lengths), reason) == body
    assert (found := plain_body.read(body)) is not None and found.runs == (prompt, new)
    assert same(decode(memoryview(body)), Sample([segment], reason))


def same(one: Sample, other: Sample) -> bool:
    pairs = zip(one.segments, other.segments, strict=True)
    return (one.finish_reason, one.info_json) == (other.finish_reason, other.info_json) and all(
        np.array_equal(a.tokens, b.tokens) and a.tokens.dtype == b.tokens.dtype and np.array_equal(a.loss_mask, b.loss_mask)
        and np.array_equal(a.logprobs, b.logprobs) and (a.spans, a.turns, a.parent, a.fork_point) == (
            b.spans, b.turns, b.parent, b.fork_point) for a, b in pairs)


@given(st.data())
def test_a_damaged_body_is_read_as_messages_would(data: st.DataObject) -> None:
    """Any change of any byte, a cut, an addition: the shortcut either says the same as a parse, or nothing."""
    tokens, mask, logprobs = np.arange(5, dtype=np.int32), np.arange(5) >= 2, -np.ones(3, np.float32)
    segment = Segment(tokens, mask, logprobs, spans(1, 2), turns=((0, 1), (1, 2)))
    body = bytearray(encode(Sample([segment], FINISH_STOP, "{}")))
    for _ in range(data.draw(st.integers(1, 3))):
        place, kind = data.draw(st.integers(0, len(body) - 1)), data.draw(st.sampled_from(["change", "cut", "add"]))
        if kind == "change":
            body[place] = data.draw(st.integers(0, 255))
        elif kind == "add":
            body[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        elif len(body) > 1:
            del body[place]
    if (plain := plain_body.read(bytes(body))) is None:
        return
    message = sample_pb2.SampleBody.FromString(bytes(body))
    (parsed,) = message.segments
    found = np.frombuffer(body, np.int32, plain.size, plain.tokens_at)
    assert found.tobytes() == parsed.tokens.data and list(parsed.tokens.shape) == [plain.size]
    found = np.frombuffer(body, np.float32, plain.generated, plain.logprobs_at)
    assert found.tobytes() == parsed.logprobs.data and list(parsed.logprobs.shape) == [plain.generated]
    assert plain.runs == tuple(parsed.loss_mask_runs) and plain.finish_reason == message.finish_reason
    assert plain.spans == tuple((v.version, v.step, v.incarnation, v.length) for v in parsed.versions)
    assert plain.turns == tuple((t.turn, t.length) for t in parsed.turns) and plain.info_json == message.info_json
    assert not (parsed.HasField("routes") or parsed.HasField("parent") or parsed.fork_point)


def test_other_arrays_go_the_long_way() -> None:
    """Token ids of another type, or a log-probability too few, are no plain body."""
    ids, logprobs = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    assert plain_body.encode(ids.astype(np.int64), ids, logprobs, spans(3), FINISH_STOP) is None
    assert plain_body.encode(ids, ids, logprobs.astype(np.float64), spans(3), FINISH_STOP) is None
    assert plain_body.encode(ids, ids, logprobs[:2], spans(3), FINISH_STOP) is None


def played(answers: list[list[int]], partial: bytes = b"", routes: bool = False) -> Episode:
    """An episode of an answer a turn to "12=" and then "3="."""
    tokenizer = character_tokenizer("0123456789=")
    episode = Episode(SampleLease(partial=partial, group_size=1), Codec(tokenizer, (1,)), 8, 64, routes)
    episode.begin(Reset("12="))
    for n, answer in enumerate(answers):
        if n:
            episode.observe(Reset("3="))
        size = len(episode.request().prompt) + len(answer) - 1
        episode.answered(Generation(
            np.array(answer, np.int32), -np.ones(len(answer), np.float32), spans(len(answer)), FINISH_STOP,
            np.zeros((size, 2, 2), np.uint8) if routes else None))
        episode.stepped(Step(None, done=n == len(answers) - 1, reward=1.0))
    return episode


@pytest.mark.parametrize("how", ["one answer", "two answers", "resumed", "with routes"])
def test_an_episode_takes_it_only_where_it_fits(how: str) -> None:
    """The body is that of the whole sample, also after a second answer, after tokens of an earlier attempt, with routes."""
    partial = encode(played([[5, 6]]).sample()) if how == "resumed" else b""
    answers = [[5, 6, 7], [8, 1]] if how == "two answers" else [[5, 6, 7]]
    episode = played(answers, partial, how == "with routes")
    body = episode.submission().body
    assert body == encode(episode.sample())
    generated = [t for s in decode(body).segments for t in s.tokens[s.loss_mask].tolist()]
    assert generated == ([5, 6] if how == "resumed" else []) + [t for answer in answers for t in answer]
