"""One episode as token sequences: observations come in, model calls go out, a sample remains.

Nothing is re-tokenised. A model call whose prompt token-extends the open segment appends to it (observation tokens are
context); any other opens a new segment:

    observation text      its tokens are appended to the open segment
    observation tokens    appended as they are
    messages              the conversation is rendered through the chat template. When the rendered text starts with what the
                          open segment stands for, only the rest is tokenised and appended; when it does not (a template that
                          strips earlier thoughts), the whole text is a new segment, forked where the tokens part

Example, two turns of text: tokens = [q q q | a a | o o | b b b], loss mask = [0 0 0 | 1 1 | 0 0 | 1 1 1], one segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np

from services.rollout.codec import Codec
from services.rollout.engine import Generation, Request
from slipstream.environment import Action, Observation, Reset, Step
from slipstream.errors import InvalidInput
from slipstream.protos.buffer.v1 import samples_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import FINISH_LENGTH, Sample, Segment, Span, decode, encode
from slipstream.sample import crc32c as checksum

NO_TOKENS, NO_MASK, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)


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
        self._messages: list[Mapping[str, str]] = []
        self._rendered = ""  # text that the open segment stands for, in a conversation of messages
        self._prompt = NO_TOKENS  # of the next call; that of a first call is shared by the group, read-only
        self._fresh = True  # the next call opens a segment
        self._calls: list[tuple[int, int]] = []  # of each model call: segment and tokens
        self._told = False  # whether the segments say whose tokens they are: the runs of the mask do not
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
        """What the model sees next. Raises InvalidInput when the tokenizer or its chat template cannot take it."""
        if observation.messages is not None:
            self._observe_messages(observation.messages)
            return
        if observation.tokens is not None:
            new = np.asarray(observation.tokens, np.int32)
            self._observed = self.codec.decode(new.tolist())
        else:
            self._observed = observation.text or ""
            new = self.codec.encode(self._observed)
        if self._messages:  # plain text in a conversation: it is part of what the template would have to reproduce
            self._rendered += self.codec.decode(new.tolist(), special=True)
        self._prompt = np.concatenate([self._prompt, new]) if len(self._prompt) else new

    def request(self) -> Request:
        """The next model call. Raises InvalidInput (PROMPT_TOO_LONG) when the context leaves no room for an answer."""
        if len(self._prompt) >= self.context:
            raise InvalidInput(
                f"{len(self._prompt)} prompt tokens leave no room in a context of {self.context}; raise rollout.context",
                "PROMPT_TOO_LONG")
        return Request(
            self._prompt, self.max_new_tokens - self._resumed, self.lease.seed, stop_token_ids=self.codec.stop_token_ids,
            routes=self.routes, position=self.generated_tokens)

    def answered(self, generation: Generation) -> Action:
        """Note the model's answer to `request`; the action for the environment."""
        answer = self.take(generation)
        return self.said(answer, self.codec.decode(answer))

    def take(self, generation: Generation) -> list[int]:
        """Append what was generated to the open segment: all tokens of this turn's answer."""
        segment = self._open()
        known, size, new = len(segment.loss_mask), len(self._prompt), len(generation.tokens)
        loss_mask = np.zeros(size + new, bool)
        loss_mask[:known], loss_mask[size:] = segment.loss_mask, True
        segment.tokens, segment.loss_mask = np.concatenate([self._prompt, generation.tokens]), loss_mask
        segment.logprobs = np.concatenate([segment.logprobs, generation.logprobs]) if known else generation.logprobs
        segment.spans = _joined(segment.spans, generation.spans)
        self._calls.append((len(self.segments) - 1, self._resumed + new))
        apart = new and (not known or size > known)  # a run of tokens of its own, as nearly all are
        self._told |= self.turn > 0 and not apart
        if generation.routes is not None:
            first = segment.routes if segment.routes is not None else generation.routes[:0]
            segment.routes = np.concatenate([first, generation.routes[len(first) :]])
        self.finish_reason = generation.finish_reason
        self.generated_tokens += new
        answer = segment.tokens[len(segment.tokens) - new - self._resumed :].tolist()
        self._resumed = 0
        self._prompt = segment.tokens
        return answer

    def said(self, answer: list[int], text: str) -> Action:
        """The action for the environment: the answer that `take` returned and its text."""
        self.turn += 1
        self.responses.append(text)
        if self._messages:
            self._messages.append({"role": "assistant", "content": text})
            self._rendered += self.codec.decode(answer, special=True)
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
        body = encode(sample)
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
        plain_before = not self._messages and len(self._prompt) > 0
        self._messages += [dict(m) for m in messages]
        self._observed = messages[-1]["content"] if messages else ""
        text = self.codec.render(self._messages)
        if plain_before or (self._rendered and text.startswith(self._rendered)):
            new = text if plain_before else text[len(self._rendered) :]
            self._prompt = np.concatenate([self._prompt, self.codec.encode(new)])
        else:
            self._prompt, self._fresh = self.codec.encode(text), True
        self._rendered = text

    def _open(self) -> Segment:
        """The segment that the next answer belongs to."""
        if self._fresh:
            self._fresh = False
            parent = len(self.segments) - 1 if self.segments else None
            fork = _common(self.segments[-1].tokens, self._prompt) if self.segments else 0
            self.segments.append(Segment(NO_TOKENS, NO_MASK, NO_LOGPROBS, (), parent=parent, fork_point=fork))
        return self.segments[-1]

    def _resume(self, sample: Sample) -> None:
        """Take over the tokens that an earlier attempt generated after the same prompt."""
        segment = sample.segments[0]
        size, new = len(self._prompt), len(segment.logprobs)
        same = len(segment.tokens) == size + new and np.array_equal(segment.tokens[:size], self._prompt)
        done = new and (new >= self.max_new_tokens or int(segment.tokens[-1]) in self.codec.stop_token_ids)
        if not same or done or len(segment.tokens) >= self.context or (segment.routes is None) == self.routes:
            return
        self.segments, self._fresh, self._resumed, self.generated_tokens = [segment], False, new, new
        self._prompt = segment.tokens


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
