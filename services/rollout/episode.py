"""One episode as token sequences: observations come in, model calls go out, a sample remains.

Nothing is re-tokenised. A model call whose prompt token-extends the open segment appends to it (observation tokens are
context); any other opens a new segment:

    observation text      its tokens are appended to the open segment
    observation tokens    appended as they are
    messages              the conversation is rendered through the chat template. When the rendered text starts with what the
                          open segment stands for, only the rest is tokenised and appended; when it does not (a template that
                          strips earlier thoughts), the whole text is a new segment, forked where the tokens part
    another conversation  has a segment of its own: nothing in its context (a compacted one), or all that another conversation
                          holds by now (a sub-agent), of which no token is trained a second time

Example, two turns of text: tokens = [q q q | a a | o o | b b b], loss mask = [0 0 0 | 1 1 | 0 0 | 1 1 1], one segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.rollout.codec import Codec
from services.rollout.engine import Generation, Request
from slipstream import plain_body
from slipstream.environment import Action, Observation, Reset, Step
from slipstream.errors import InvalidInput
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import FINISH_LENGTH, Sample, Segment, Span, decode, encode
from slipstream.sample import crc32c as checksum

NO_TOKENS, NO_MASK, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)


@dataclass(slots=True)
class _Conversation:
    """One line of model calls of an episode, each of which sees the ones before."""

    messages: list[Mapping[str, str]] = field(default_factory=list)
    rendered: str = ""  # text that the open segment stands for, when there are messages
    prompt: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # of the next call; a group shares the first: read-only
    segment: int | None = None  # the open one; None: the next call opens one


class Episode:
    """The tokens of one leased sample, from its first observation on. Pure: no I/O, no clock."""

    def __init__(
        self, lease: samples_pb2.SampleLease, codec: Codec, max_new_tokens: int, context: int, routes: bool = False,
    ) -> None:
        self.lease, self.codec = lease, codec
        self.max_new_tokens, self.context, self.routes = max_new_tokens, context, routes
        self.segments: list[Segment] = []
        self.generated_tokens = 0
        self.turn = 0  # finished model calls
        self.finish_reason = FINISH_LENGTH
        self.reset: Reset
        self.responses: list[str] = []
        self.rewards: list[float | None] = []
        self.components: dict[str, float] = {}
        self._observed = ""  # the last observation, as text
        self._now = _Conversation()
        self._conversations = {"": self._now}
        self._calls: list[tuple[int, int]] = []  # of each model call: segment and tokens
        self._told = False  # whether the segments say whose tokens they are: the runs of the mask do not
        self._plain: tuple[np.ndarray, Generation] | None = None  # the first prompt and answer, when they came without routes
        self._resumed = 0  # tokens of this call that an earlier attempt generated

    @property
    def draw(self) -> int:
        return self.lease.lease.sample.draw.number

    def begin(self, reset: Reset) -> None:
        """The first observation. Goes on from the lease's partial when that has the same prompt. Raises InvalidInput."""
        self.reset = reset
        self.observe(reset)
        if self.lease.partial:
            self._resume(decode(self.lease.partial))

    def observe(self, observation: Observation) -> None:
        """What the model sees next. Raises InvalidInput when the tokenizer or its chat template cannot take it, and for a
        conversation that cannot be forked so.
        """
        if observation.conversation or observation.fork_of is not None or self._now is not self._conversations[""]:
            self._now = self._conversation(observation.conversation, observation.fork_of)
        now = self._now
        if observation.messages is not None:
            self._observe_messages(observation.messages)
            return
        if observation.tokens is not None:
            new = np.asarray(observation.tokens, np.int32)
            self._observed = self.codec.decode(new.tolist())
        else:
            self._observed = observation.text or ""
            new = self.codec.encode(self._observed)
        if now.messages:  # plain text in a conversation: it is part of what the template would have to reproduce
            now.rendered += self.codec.decode(new.tolist(), special=True)
        now.prompt = np.concatenate([now.prompt, new]) if len(now.prompt) else new

    def request(self) -> Request:
        """The next model call. Raises InvalidInput (PROMPT_TOO_LONG) when the context leaves no room for an answer."""
        if len(self._now.prompt) >= self.context:
            raise InvalidInput(
                f"{len(self._now.prompt)} prompt tokens leave no room in a context of {self.context}; raise rollout.context",
                "PROMPT_TOO_LONG")
        return Request(
            self._now.prompt, self.max_new_tokens - self._resumed, self.lease.seed, stop_token_ids=self.codec.stop_token_ids,
            routes=self.routes, position=self.generated_tokens)

    def answered(self, generation: Generation) -> Action:
        """Note the model's answer to `request`; the action for the environment."""
        answer = self.take(generation)
        return self.said(answer, self.codec.decode(answer))

    def take(self, generation: Generation) -> list[int]:
        """Append what was generated to the open segment: all tokens of this turn's answer."""
        if not self.segments:
            return self._take_first(generation)
        at, segment = self._open()
        known, size, new = len(segment.loss_mask), len(self._now.prompt), len(generation.tokens)
        loss_mask = np.zeros(size + new, bool)
        loss_mask[:known], loss_mask[size:] = segment.loss_mask, True
        segment.tokens, segment.loss_mask = np.concatenate([self._now.prompt, generation.tokens]), loss_mask
        segment.logprobs = np.concatenate([segment.logprobs, generation.logprobs]) if known else generation.logprobs
        segment.spans = _joined(segment.spans, generation.spans)
        apart = new and (not known or size > known)  # a run of tokens of its own, as nearly all are
        self._told |= self.turn > 0 and not (apart and at >= self._calls[-1][0])  # and segments that do not take turns
        self._calls.append((at, self._resumed + new))
        if generation.routes is not None:
            first = segment.routes if segment.routes is not None else generation.routes[:0]
            segment.routes = np.concatenate([first, generation.routes[len(first) :]])
        self.finish_reason = generation.finish_reason
        self.generated_tokens += new
        answer = segment.tokens[len(segment.tokens) - new - self._resumed :].tolist()
        self._resumed = 0
        self._now.prompt = segment.tokens
        return answer

    def _take_first(self, generation: Generation) -> list[int]:
        """The same for the first answer of an episode, as nearly all are: its prompt and itself are the first segment."""
        prompt, new = self._now.prompt, len(generation.tokens)
        loss_mask = np.zeros(len(prompt) + new, bool)
        loss_mask[len(prompt) :] = True
        tokens = np.concatenate([prompt, generation.tokens])
        self.segments.append(Segment(tokens, loss_mask, generation.logprobs, generation.spans, generation.routes))
        self._calls.append((0, new))
        self._plain = (prompt, generation) if generation.routes is None else None
        self.finish_reason = generation.finish_reason
        self.generated_tokens += new
        self._now.segment, self._now.prompt = 0, tokens
        return generation.tokens.tolist()

    def _body(self, sample: Sample) -> bytes:
        """The sample as it travels."""
        if self._plain is not None and len(self._calls) == 1:
            prompt, generation = self._plain
            body = plain_body.encode(
                prompt, generation.tokens, generation.logprobs, generation.spans, sample.finish_reason)
            if body is not None:
                return body
        return encode(sample)

    def said(self, answer: list[int], text: str) -> Action:
        """The action for the environment: the answer that `take` returned and its text."""
        self.turn += 1
        self.responses.append(text)
        if self._now.messages:
            self._now.messages.append({"role": "assistant", "content": text})
            self._now.rendered += self.codec.decode(answer, special=True)
        return Action(text, answer, self.finish_reason)

    def stepped(self, step: Step) -> None:
        """Note the value of a turn."""
        self.rewards.append(step.reward)
        for name, value in step.components.items():
            self.components[name] = self.components.get(name, 0.0) + value

    def sample(self) -> Sample:
        if self._told:
            for i, segment in enumerate(self.segments):
                segment.turns = tuple((turn, tokens) for turn, (at, tokens) in enumerate(self._calls) if at == i)
        return Sample(self.segments, self.finish_reason)

    def partial(self, generation: Generation) -> bytes:
        """The body of the first turn as far as it went; b"" when there is nothing worth keeping."""
        if self.turn or not len(generation.tokens) + self.generated_tokens:
            return b""
        self.take(generation)
        return encode(self.sample())

    def submission(self) -> samples_pb2.SubmittedSample:
        """The finished sample with its score or its transcript. The buffer checks it; here only that there is something."""
        sample = self.sample()
        if not self.generated_tokens:
            raise InvalidInput("no token was generated", "NO_GENERATED_TOKENS")
        body = self._body(sample)
        oldest, newest = sample.steps
        submitted = samples_pb2.SubmittedSample(
            lease=self.lease.lease, body=body, crc32c=checksum(body), tokens=sample.tokens,
            generated_tokens=self.generated_tokens, oldest_step=oldest, newest_step=newest)
        if any(reward is not None for reward in self.rewards) or not self.reset.scorer:
            values = [reward or 0.0 for reward in self.rewards]
            submitted.score.CopyFrom(sample_pb2.Score(scalar=sum(values), components=self.components))
            if len(values) > 1:
                submitted.score.per_turn.extend(values)
        else:
            submitted.transcript = sample_pb2.Transcript(
                prompt=self._observed, response="".join(self.responses), answer=self.reset.answer, scorer=self.reset.scorer,
                info_json=json.dumps(self.reset.info) if self.reset.info else "").SerializeToString()
        return submitted

    def _observe_messages(self, messages: Sequence[Mapping[str, str]]) -> None:
        now = self._now
        plain_before = not now.messages and len(now.prompt) > 0
        now.messages += [dict(m) for m in messages]
        self._observed = messages[-1]["content"] if messages else ""
        text = self.codec.render(now.messages)
        if plain_before or (now.rendered and text.startswith(now.rendered)):
            new = text if plain_before else text[len(now.rendered) :]
            now.prompt = np.concatenate([now.prompt, self.codec.encode(new)])
        else:
            now.prompt, now.segment = self.codec.encode(text), None
        now.rendered = text

    def _conversation(self, name: str, fork_of: str | None) -> _Conversation:
        """The conversation of this name; a new one is empty, or a copy of `fork_of`."""
        found = self._conversations.get(name)
        if fork_of is None:
            return found if found is not None else self._conversations.setdefault(name, _Conversation())
        origin = self._conversations.get(fork_of)
        if found is not None or origin is None:
            why = f"there is no conversation {fork_of!r}" if origin is None else f"there is a conversation {name!r} already"
            raise InvalidInput(f"conversation {name!r} as a fork of {fork_of!r}: {why}", "CONVERSATION", field="conversation")
        return self._conversations.setdefault(name, replace(origin, messages=list(origin.messages), segment=None))

    def _open(self) -> tuple[int, Segment]:
        """The segment that the next answer belongs to, and its number."""
        now = self._now
        if now.segment is None:
            shared = [_common(segment.tokens, now.prompt) for segment in self.segments]
            most = max(shared, default=0)
            now.segment = len(self.segments)
            self.segments.append(Segment(
                NO_TOKENS, NO_MASK, NO_LOGPROBS, (), parent=shared.index(most) if most else None, fork_point=most))
        return now.segment, self.segments[now.segment]

    def _resume(self, sample: Sample) -> None:
        """Take over the tokens that an earlier attempt generated after the same prompt."""
        segment = sample.segments[0]
        size, new = len(self._now.prompt), len(segment.logprobs)
        same = len(segment.tokens) == size + new and np.array_equal(segment.tokens[:size], self._now.prompt)
        done = new and (new >= self.max_new_tokens or int(segment.tokens[-1]) in self.codec.stop_token_ids)
        if not same or done or len(segment.tokens) >= self.context or (segment.routes is None) == self.routes:
            return
        self.segments, self._now.segment, self._resumed, self.generated_tokens = [segment], 0, new, new
        self._now.prompt = segment.tokens


def _joined(a: tuple[Span, ...], b: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans one after the other, neighbours of one version as one."""
    if a and b and (a[-1].version, a[-1].incarnation) == (b[0].version, b[0].incarnation):
        middle = Span(b[0].version, b[0].step, b[0].incarnation, a[-1].length + b[0].length)
        return (*a[:-1], middle, *b[1:])
    return a + b


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size
