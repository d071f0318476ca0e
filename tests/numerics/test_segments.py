"""Samples of several segments, from a real episode to the loss: compaction, sub-agents, a template that strips thoughts.

Each kind of episode is played by the rollout service with a tiny model over gRPC; what it submits goes through packing into
a step of the trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, microbatches, trained_rows
from slipstream import config
from slipstream.environment import Action, Environment, Episode, Observation, Reset, Step, Task
from slipstream.environments import wire
from slipstream.errors import InvalidInput
from slipstream.manifest import write_version
from slipstream.model import build, files, load_state, state
from slipstream.objects import open_store
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import Sample, turn_numbers, validate
from tests.rollout_runs import run_file
from tests.scripted_buffer import ScriptedBuffer, service
from tests.unit.test_rollout_episode import answer, episode

# A chat whose earlier answers lose all but their last character: thoughts are stripped once they are past.
STRIPPING = (
    "{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content[-1:] }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}")


class Compacting(Environment):
    """Three calls in one context, then a summary of it in a fresh one, and two more calls."""

    inline = True

    def reset(self, task: Task) -> Reset:
        return Reset("12=")

    def step(self, episode: Episode, action: Action) -> Step:
        if episode.turn < 3:
            return Step("3=", reward=0.0)
        if episode.turn == 3:
            return Step(Observation("12=4", conversation="after the summary"), reward=0.0)
        if episode.turn == 4:
            return Step(Observation("5=", conversation="after the summary"), reward=0.0)
        return Step(done=True, reward=float(episode.task.index % 2))


class Agents(Environment):
    """The main agent plans; two sub-agents fork from it and take turns; the main one goes on."""

    inline = True

    def reset(self, task: Task) -> Reset:
        return Reset("abc 12=")

    def step(self, episode: Episode, action: Action) -> Step:
        script = [
            Observation("a=", conversation="a", fork_of=""), Observation("b=", conversation="b", fork_of=""),
            Observation("0=", conversation="a"), Observation("1=", conversation="b"), Observation("99=")]
        done = episode.turn > len(script)
        return Step(None if done else script[episode.turn - 1], done=done, reward=float(done and episode.task.index % 2))


class Thinking(Environment):
    """Three turns of a chat."""

    inline = True

    def reset(self, task: Task) -> Reset:
        return Reset(messages=[{"role": "user", "content": "12="}])

    def step(self, episode: Episode, action: Action) -> Step:
        done = episode.turn == 3
        seen = None if done else Observation(messages=[{"role": "user", "content": f"{episode.turn}="}])
        return Step(seen, done=done, reward=float(done and episode.task.index % 2))


class Played:
    """Four samples of one environment: what the worker submitted, and the weights that it had."""

    def __init__(self, run: config.RunFile, buffer: ScriptedBuffer, model: Any) -> None:
        self.run, self.model = run, model.eval()
        self.samples = [buffer.sample(draw) for draw in range(4)]
        self.scores = [buffer.submitted[draw].score for draw in range(4)]

    def groups(self) -> list[Group]:
        """Two groups of two."""
        members = [Member(i % 2, sample, score.scalar)
                   for i, (sample, score) in enumerate(zip(self.samples, self.scores, strict=True))]
        return [Group(0, members[:2]), Group(1, members[2:])]


async def play(folder: Path, environment: type[Environment]) -> Played:
    run = run_file(
        folder, f"{__name__}:{environment.__name__}", service={"metrics": False}, trainer={"learning_rate": 1e-3},
        rollout={"slots": 16, "context": 128, "max_new_tokens": 5, "heartbeat_s": 0.05})
    model, tokenizer = build(run.model, 0, run.deterministic)
    tokenizer.chat_template = STRIPPING
    buffer = ScriptedBuffer()
    async with service(run, buffer):
        async with open_store(run.objects_url) as store:
            version: policy_pb2.PolicyVersion = await write_version(
                store, run=run.run.name, number=1, step=0, incarnation=1, tensors=state(model), files=files(model, tokenizer))
        await buffer.announce(version)
        await buffer.grant(0, 1, 2, 3)
        await buffer.until(lambda: len(buffer.submitted) == 4)
    return Played(run, buffer, model)


def trained(sample: Sample) -> int:
    return sum(int(s.loss_mask.sum()) for s in sample.segments)


def learner(played: Played) -> Learner:
    made = Learner(played.run)
    load_state(made.model, state(played.model))
    return made


def log_probabilities(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """By transformers' own forward of one segment, nothing packed or padded."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].double().log_softmax(-1)
    at = np.flatnonzero(mask)
    return logits[at - 1, ids[0, at]].numpy()


SHAPES = {  # segments: parent; runs of generated tokens in each
    Compacting: ([None, 0], [3, 2]),
    Agents: ([None, 0, 0], [2, 2, 2]),
    Thinking: ([None, 0, 1], [1, 1, 1]),
}


@pytest.mark.parametrize("environment", SHAPES, ids=lambda e: e.__name__)
async def test_from_the_episode_to_the_loss(tmp_path: Path, environment: type[Environment]):
    """Segments and their parents are as told; every token that the model said is trained once, in the segment where it said
    it, and what a fork or a summary repeats is context; log-probabilities of sampler and trainer are those of a transformers
    forward of each segment; groups compare samples, however many segments they have; the loss has one denominator for all."""
    played = await play(tmp_path, environment)
    parents, calls = SHAPES[environment]
    for sample in played.samples:
        validate(sample)
        assert [s.parent for s in sample.segments] == parents
        for i, segment in enumerate(sample.segments):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], segment.loss_mask.astype(int), [0]])) == 1)
            assert len(edges) == calls[i]
            expected = log_probabilities(played.model, segment.tokens, segment.loss_mask)
            np.testing.assert_allclose(segment.logprobs, expected, atol=2e-5)
            if segment.parent is not None:
                parent, fork = sample.segments[segment.parent], segment.fork_point
                assert fork > 0 and np.array_equal(segment.tokens[:fork], parent.tokens[:fork])
                assert not segment.loss_mask[:fork].any(), "what is shared is trained in the parent alone"
    made, groups = learner(played), played.groups()
    rows = trained_rows(groups, 1, made.objective)
    tokens = sum(trained(s) for s in played.samples)
    assert len(rows) == sum(len(s.segments) for s in played.samples)
    assert sum(len(row.index) for row in rows) == tokens == sum(s.generated_tokens for s in played.samples)
    by_sample: dict[tuple[int, int], set[float]] = {}
    for row in rows:
        assert row.advantages is not None
        by_sample.setdefault(row.origin[:2], set()).update(row.advantages.tolist())
        assert row.weight == pytest.approx(1 / tokens)
    half = 0.5**0.5
    assert {k: [pytest.approx(v, rel=1e-4) for v in values] for k, values in by_sample.items()} == {
        (0, 0): [-half], (0, 1): [half], (1, 0): [-half], (1, 1): [half]}
    for row in rows:  # the trainer's own log-probabilities, padded and in micro-batches
        segment = played.samples[2 * row.origin[0] + row.origin[1]].segments[row.origin[2]]
        [batch] = microbatches([row], 1000)
        found = made.forward(batch)[0].detach().numpy()
        np.testing.assert_allclose(found, log_probabilities(played.model, segment.tokens, segment.loss_mask), atol=2e-5)
    metrics = made.step(groups, 1)
    assert metrics["trained_tokens"] == tokens and metrics["samples"] == 4 and metrics["gap_fresh_max"] < 2e-5
    assert metrics["lags"] == {"0": tokens}


async def test_gradients_of_segments_are_those_of_the_plain_sum(tmp_path: Path):
    """The step's gradient equals sum over segments of -A/N sum log pi by transformers and autograd, segment by segment."""
    played = await play(tmp_path, Agents)
    made, model = learner(played), played.model
    seen: dict[str, torch.Tensor] = {}
    made.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}))
    metrics = made.step(played.groups(), 1)
    tokens, half = sum(trained(s) for s in played.samples), 0.5**0.5
    model.zero_grad()
    for i, sample in enumerate(played.samples):
        for segment in sample.segments:
            ids, at = torch.from_numpy(segment.tokens.astype(np.int64)), torch.from_numpy(np.flatnonzero(segment.loss_mask))
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]]
            (-(half if i % 2 else -half) * logprobs.sum() / tokens).backward()
    scale = min(1.0, 1.0 / metrics["grad_norm"])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(
                seen[name], parameter.grad * scale, rtol=2e-3, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")


async def test_turns_of_agents_find_their_tokens(tmp_path: Path):
    """Calls 0 (main), 1 (a), 2 (b), 3 (a), 4 (b), 5 (main): segments take turns, and each token knows its call."""
    played = await play(tmp_path, Agents)
    for sample, score in zip(played.samples, played.scores, strict=True):
        turns = turn_numbers(sample)
        assert [sorted(set(t.tolist())) for t in turns] == [[0, 5], [1, 3], [2, 4]]
        assert len(score.per_turn) == 6


def test_a_fork_that_cannot_be_is_refused():
    """Of a conversation that nobody began, or under a name that is taken: both names are told."""
    subject = episode()
    subject.begin(Reset("1?"))
    subject.answered(answer(subject, "2"))
    with pytest.raises(InvalidInput, match="'a' as a fork of 'b': there is no conversation 'b'"):
        subject.observe(Observation("3?", conversation="a", fork_of="b"))
    with pytest.raises(InvalidInput, match="there is a conversation '' already"):
        subject.observe(Observation("3?", fork_of=""))


@pytest.mark.parametrize("seen", [
    Observation("1="), Observation(tokens=[3, 4], conversation="a"), Observation("", conversation="a", fork_of=""),
    Observation(messages=[{"role": "user", "content": "hi"}], conversation="b", fork_of="a"), Observation(messages=[])])
def test_conversations_cross_the_wire(seen: Observation):
    """An environment behind gRPC says the same; a fork of the main conversation, whose name is empty, is not no fork."""
    sent = wire.step_response([Step(seen)])
    [got] = wire.step_results(sent, 1)
    assert isinstance(got, Step) and got.observation == seen
