"""Episodes as token sequences: what is appended, what opens a new segment, what the loss mask covers, what is submitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.rollout.codec import Codec
from services.rollout.engine import Generation
from services.rollout.episode import Episode
from slipstream.environment import Observation, Reset, Step
from slipstream.errors import InvalidInput
from slipstream.model import character_tokenizer
from slipstream.protos.buffer.v1.samples_pb2 import SampleLease
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, Span, decode, turn_numbers, validate

CHATML = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}")
# The same, but earlier answers lose everything up to ")": a template that strips thoughts.
STRIPPING = CHATML.replace("{{ m.content }}", "{{ m.content.split(')')[-1] if not loop.last else m.content }}")


def tokenizer(template: str = "") -> Any:
    made = character_tokenizer("0123456789=+?()<>asu\n ")
    made.chat_template = template or None
    return made


def episode(partial: bytes = b"", template: str = "", **settings: Any) -> Episode:
    lease = SampleLease(seed=77, partial=partial)
    lease.lease.sample.draw.number = 5
    settings = {"max_new_tokens": 8, "context": 64, **settings}
    return Episode(lease, Codec(tokenizer(template), (1,)), **settings)


def answer(subject: Episode, text: str, eos: bool = True, version: int = 1, routes: bool = False) -> Generation:
    """What the engine would return for the pending request, had the model said `text`."""
    tokens = np.array([*subject.codec.encode(text), *[1] * eos], np.int32)
    size = len(subject.request().prompt)
    return Generation(
        tokens, np.full(len(tokens), -0.5, np.float32), (Span(version, version - 1, 1, len(tokens)),),
        FINISH_STOP if eos else FINISH_LENGTH,
        np.full((size + len(tokens) - 1, 2, 2), version, np.uint8) if routes else None)


def text(subject: Episode, segment: int = 0) -> str:
    return subject.codec.decode(subject.segments[segment].tokens, special=True)


def test_one_turn_with_a_scorer() -> None:
    """Prompt is context, answer is trained, EOS included once; the transcript has neither prompt nor EOS in its response."""
    subject = episode()
    subject.begin(Reset(text="31=", answer="13", scorer="exact", info={"level": 2}))
    request = subject.request()
    assert (request.seed, request.position, request.stop_token_ids, request.max_new_tokens) == (77, 0, (1,), 8)
    action = subject.answered(answer(subject, "13"))
    assert (action.text, list(action.tokens), action.finish_reason) == ("13", [3, 5, 1], FINISH_STOP)
    subject.stepped(Step(done=True))
    submitted = subject.submission()
    sample = decode(submitted.body)
    assert sample.segments[0].loss_mask.tolist() == [False] * 3 + [True] * 3
    assert text(subject) == "31=13<eos>"
    assert (submitted.tokens, submitted.generated_tokens, submitted.oldest_step, submitted.newest_step) == (6, 3, 0, 0)
    transcript = sample_pb2.Transcript.FromString(submitted.transcript)
    assert (transcript.prompt, transcript.response, transcript.answer, transcript.scorer) == ("31=", "13", "13", "exact")
    assert transcript.info_json == '{"level": 2}' and not submitted.HasField("score")


def test_text_turns_append_to_one_segment() -> None:
    """Observation tokens between two answers are context; spans of one version join; rewards add up, one per turn."""
    subject = episode(routes=True)
    subject.begin(Reset(text="1?"))
    subject.answered(answer(subject, "2", routes=True))
    subject.stepped(Step(Observation(text="3?"), reward=0.25, components={"a": 1.0}))
    subject.observe(Observation(text="3?"))
    request = subject.request()
    assert request.position == 2, "sampling goes on where the first answer stopped"
    assert subject.codec.decode(request.prompt, special=True) == "1?2<eos>3?"
    subject.answered(answer(subject, "4", version=2, routes=True))
    subject.stepped(Step(done=True, reward=0.5, components={"a": 2.0}))
    [segment] = subject.segments
    assert segment.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert segment.spans == (Span(1, 0, 1, 2), Span(2, 1, 1, 2)) and len(segment.logprobs) == 4
    assert segment.routes is not None and segment.routes[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 2], "first routes are kept"
    submitted = subject.submission()
    assert submitted.score.scalar == 0.75 and list(submitted.score.per_turn) == [0.25, 0.5]
    assert dict(submitted.score.components) == {"a": 3.0} and not submitted.transcript
    assert (submitted.oldest_step, submitted.newest_step) == (0, 1)


def test_tokens_are_appended_as_they_are() -> None:
    """An observation of ids is not decoded and encoded again."""
    subject = episode()
    subject.begin(Reset(tokens=[4, 1, 4]))
    assert subject.request().prompt.tolist() == [4, 1, 4]


def test_a_chat_template_that_extends_keeps_one_segment() -> None:
    """Only what the template adds after the answer is tokenised; the generated tokens stay as they were sampled."""
    subject = episode(template=CHATML)
    subject.begin(Reset(messages=[{"role": "system", "content": "0"}, {"role": "user", "content": "1+1?"}]))
    assert subject.codec.decode(subject.request().prompt, special=True) == "<s>0\n<u>1+1?\n<a>"
    subject.answered(answer(subject, "2\n", eos=False))
    subject.observe(Observation(messages=[{"role": "user", "content": "(2)+1?"}]))
    # The template would write "2" + "\n" + "\n": what it renders does start with what was said.
    assert subject.codec.decode(subject.request().prompt, special=True) == "<s>0\n<u>1+1?\n<a>2\n\n<u>(2)+1?\n<a>"
    subject.answered(answer(subject, "3", eos=False))
    assert len(subject.segments) == 1 and subject.segments[0].loss_mask.sum() == 3


def test_a_chat_template_that_strips_thoughts_forks_a_segment() -> None:
    """The second prompt does not extend the first segment: a new one, whose parent and fork point say where they part."""
    subject = episode(template=STRIPPING)
    subject.begin(Reset(messages=[{"role": "user", "content": "1+1?"}]))
    subject.answered(answer(subject, "(1)2\n", eos=False))
    subject.observe(Observation(messages=[{"role": "user", "content": "+1?"}]))
    subject.answered(answer(subject, "3", eos=False))
    first, second = subject.segments
    assert (text(subject, 0), text(subject, 1)) == ("<u>1+1?\n<a>(1)2\n", "<u>1+1?\n<a>2\n\n<u>+1?\n<a>3")
    assert (first.parent, second.parent, second.fork_point) == (None, 0, len("<u>1+1?\n<a>"))
    assert second.loss_mask.sum() == 1
    validate(subject.sample())


def test_a_partial_is_taken_over() -> None:
    """A handed-back answer goes on after its tokens: same seed, position 3, the rest of the budget; the action has it all."""
    subject = episode()
    subject.begin(Reset(text="31=", scorer="exact"))
    cut = answer(subject, "123", eos=False)
    cut.finish_reason = FINISH_ABORT
    body = subject.partial(cut)
    heir = episode(body)
    heir.begin(Reset(text="31=", scorer="exact"))
    request = heir.request()
    assert (request.position, request.max_new_tokens, heir.codec.decode(request.prompt)) == (3, 5, "31=123")
    assert heir.answered(answer(heir, "4", version=3)).text == "1234"
    assert heir.segments[0].spans == (Span(1, 0, 1, 3), Span(3, 2, 1, 2))
    assert heir.segments[0].loss_mask.tolist() == [False] * 3 + [True] * 5
    validate(heir.sample())
    stranger = episode(body)
    stranger.begin(Reset(text="42=", scorer="exact"))
    assert stranger.request().position == 0, "another prompt: the partial is of no use"
    assert episode().partial(Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FINISH_ABORT)) == b""


def test_what_cannot_be_asked_is_refused_by_name() -> None:
    """A prompt over the context, and text outside of the tokenizer's alphabet."""
    long = episode(context=4)
    long.begin(Reset(text="12345"))
    with pytest.raises(InvalidInput, match=r"rollout\.context"):
        long.request()
    with pytest.raises(InvalidInput, match="cannot encode"):
        episode().begin(Reset(text="émigré"))
    with pytest.raises(InvalidInput, match="chat template"):
        episode().begin(Reset(messages=[{"role": "user", "content": "1"}]))


def test_calls_that_nothing_separates_are_told_apart() -> None:
    """An observation without text: the second answer follows the first directly, so the segment says whose they are. As a
    rule runs of generated tokens do, and the body has no more bytes for it."""
    for between, turns in (("", ((0, 2), (1, 2))), ("3?", ())):
        subject = episode()
        subject.begin(Reset(text="1?"))
        subject.answered(answer(subject, "2"))
        subject.observe(Observation(text=between))
        subject.answered(answer(subject, "4"))
        [segment] = decode(subject.submission().body).segments
        assert segment.turns == turns
        assert [n.tolist() for n in turn_numbers(subject.sample())] == [[0, 0, 1, 1]]
