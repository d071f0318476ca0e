"""Scores of turns and of tokens reach the advantages of the right tokens, whatever segments they lie in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.objective import Episode, Objective
from services.trainer.batches import assemble, placed
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, trained_rows
from slipstream.config import Algorithm
from slipstream.errors import ConfigError, InvalidInput
from slipstream.protos.buffer.v1 import batches_pb2
from slipstream.protos.types.v1 import sample_pb2
from slipstream.sample import Sample, Segment, Span, decode, encode, tensor, turn_numbers, validate
from tests.oracles import Config, verl
from tests.trainer_samples import run_file

Turns = Sequence[tuple[int, int]]


def segment(mask: Sequence[int], step: int = 0, turns: Turns = ()) -> Segment:
    """Tokens 2, 3, 4, ... of which those with a 1 were generated."""
    flags = np.array(mask, bool)
    count = int(flags.sum())
    return Segment(
        np.arange(2, 2 + len(mask), dtype=np.int32) % 12, flags, np.full(count, -1.5, np.float32),
        (Span(step + 1, step, 1, count),), turns=tuple(turns))


# What the three kinds of multi-segment samples look like: (segments, tokens of each call in the order of the calls).
COMPACTED = Sample([segment([0, 1, 1, 0, 1]), segment([0, 0, 1, 1])])  # a summary replaces the history: calls 0, 1, then 2
STRIPPED = Sample([segment([0, 1, 1]), segment([0, 1, 0, 1]), segment([0, 0, 0, 1])])  # earlier thoughts leave the prompt
PARALLEL = Sample([  # two agents take turns: calls 0 and 2 are one's, 1 and 3 the other's
    segment([0, 1, 1, 0, 1], turns=[(0, 2), (2, 1)]), segment([0, 1, 0, 1, 1], turns=[(1, 1), (3, 2)])])


def score(**fields: Any) -> sample_pb2.Score:
    if "per_token" in fields:
        fields["per_token"] = tensor(np.array(fields["per_token"], np.float32))
    return sample_pb2.Score(**fields)


def from_the_wire(
    samples: Sequence[Sample], scores: Sequence[sample_pb2.Score], credit: str,
) -> tuple[list[Group], dict[str, int]]:
    """As the trainer gets them: bodies and a batch's composition, through `assemble`."""
    batch = batches_pb2.Batch(batch=1)
    group = batch.groups.add()
    group.draw.number = 5
    bodies = {}
    for i, (sample, given) in enumerate(zip(samples, scores, strict=True)):
        validate(sample)
        member = group.members.add(score=given)
        member.sample.index, member.sample.draw.number = i, 5
        bodies[0, 5, i] = encode(sample)
    read = assemble(batch, bodies, credit)
    return read.groups, read.score_failures


def advantages(
    samples: Sequence[Sample], scores: Sequence[sample_pb2.Score], credit: Any, **algorithm: Any,
) -> list[list[list[float]]]:
    """Of each sample's rows."""
    read, _ = from_the_wire(samples, scores, credit)
    rows = trained_rows(read, 1, Objective(Algorithm(credit=credit, **algorithm), 64), value=zeros)
    return [[row.advantages.tolist() for row in rows if row.origin[1] == i] for i in range(len(samples))]


def zeros(rows):
    return [dataclasses.replace(row, values=np.zeros(len(row.index))) for row in rows]


def test_turns_are_runs_unless_the_segment_says_otherwise():
    """Calls are counted over all segments; those that take turns say whose they are, also on the wire."""
    assert [n.tolist() for n in turn_numbers(COMPACTED)] == [[0, 0, 1], [2, 2]]
    assert [n.tolist() for n in turn_numbers(decode(encode(PARALLEL)))] == [[0, 0, 2], [1, 3, 3]]
    with pytest.raises(InvalidInput, match="turns covers 1 of 2"):
        validate(Sample([segment([0, 1, 1], turns=[(0, 1)])]))


@pytest.mark.parametrize(("sample", "per_turn", "expected"), [
    (COMPACTED, [0.1, 0.2, 0.3], [0, 0.1, 0.2, 0, 0.7]),
    (STRIPPED, [0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.2, 0.3, 0.4]),
    (PARALLEL, [0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.3, 0.2, 0, 0.4]),
    (Sample([segment([0, 1, 1, 1, 1], turns=[(0, 2), (1, 2)])]), [1, 0], [0, 1, 0, 0]),
    (Sample([segment([0, 1, 1], turns=[(0, 2), (1, 0)])]), [0, 1], [0, 1]),
])
def test_the_value_of_a_turn_lies_on_its_last_token(sample, per_turn, expected):
    """In the order of the calls, over segments; what the turns leave of the scalar lies on the last token of the last call. A
    call that generated nothing gives its value to the token before."""
    given = score(scalar=1, per_turn=per_turn)
    reward, rewards, failure = placed(given, sample, "turn")
    assert (reward, failure) == (1, "") and rewards is not None
    np.testing.assert_allclose(rewards, expected, atol=1e-12)
    assert placed(given, sample, "sample") == (1, None, "")


def test_the_value_of_a_token_lies_on_it():
    """per_token runs over the generated tokens of all segments; the rest of the scalar comes last in time, not in place."""
    _, rewards, _ = placed(score(scalar=2, per_token=[0.5, 0, 0.25, 0, 0, 0.25]), PARALLEL, "token")
    assert rewards is not None and rewards.tolist() == [0.5, 0, 0.25, 0, 0, 1.25]
    swapped = Sample([segment([0, 1, 1], turns=[(1, 2)]), segment([0, 1], turns=[(0, 1)])])
    _, rewards, _ = placed(score(scalar=1, per_token=[0, 0, 0.25]), swapped, "token")
    assert rewards is not None and rewards.tolist() == [0, 0.75, 0.25]


@pytest.mark.parametrize(("given", "credit", "words"), [
    (score(scalar=1, per_turn=[1, 0]), "turn", "per_turn: 2 values for 3 model calls"),
    (score(scalar=1, per_token=[1, 0]), "token", "per_token: shape [2] for 5 generated tokens"),
    (score(scalar=1, failure="timeout"), "turn", "timeout"),
])
def test_values_that_do_not_fit_are_a_failure_of_the_score(given, credit, words):
    """They count as 0, by name, like every failure of a scorer; with credit = sample nobody looks at them."""
    read, failures = from_the_wire([COMPACTED, COMPACTED], [given, score(scalar=1)], credit)
    assert failures == {words: 1}
    assert [m.reward for m in read[0].members] == [0, 1] and read[0].members[0].rewards is None
    read, failures = from_the_wire([COMPACTED], [score(scalar=1, per_turn=[1, 0])], "sample")
    assert not failures and read[0].members[0].reward == 1


@pytest.mark.parametrize("sample", [COMPACTED, STRIPPED, PARALLEL], ids=["compacted", "stripped", "parallel"])
def test_gae_gives_a_turns_value_to_what_led_to_it(sample):
    """With V = 0 and lambda = 0.5 an advantage is the sum of what follows, halved per generated token, over segments and in
    the order of the calls; tokens after the rewarded turn get nothing of it."""
    calls = int(max(numbers.max() for numbers in turn_numbers(sample))) + 1
    for rewarded in range(calls):
        [found] = advantages([sample], [score(scalar=1, per_turn=[float(k == rewarded) for k in range(calls)])], "turn",
                             preset="ppo", gae_lambda=0.5, whiten=False)
        flat, turns = np.concatenate([np.array(part) for part in found]), np.concatenate(turn_numbers(sample))
        order = np.argsort(turns, kind="stable")
        last = np.flatnonzero(turns[order] == rewarded)[-1]
        expected = [0.5 ** (last - t) if t <= last else 0.0 for t in range(len(order))]
        np.testing.assert_allclose(flat[order], expected, atol=1e-12)


def test_groups_compare_turn_by_turn():
    """Three samples, two of which came to a second call. Call 0 compares what all three brought from there on, call 1 what the
    two did; each equal to verl's group advantage on those returns. A call that one sample alone came to compares nothing."""
    short, long = Sample([segment([0, 1, 1])]), Sample([segment([0, 1, 0, 1, 1])])
    alone = Sample([segment([0, 1]), segment([0, 0, 1]), segment([0, 1, 1])])
    scores = [score(scalar=sum(values), per_turn=values) for values in ([0.5], [1, 0.5], [0, 0.25, 0.5])]
    found = advantages([short, long, alone], scores, "turn")
    first, second = (verl().compute_grpo_outcome_advantage(
        values, values.new_ones(values.shape), np.zeros(len(values), int), epsilon=1e-6)[0][:, 0].tolist()
        for values in (doubles([0.5, 1.5, 0.75]), doubles([0.5, 0.75])))
    assert found == [
        [pytest.approx([first[0]] * 2)], [pytest.approx([first[1], second[0], second[0]])],
        [pytest.approx([first[2]]), pytest.approx([second[1]]), [0, 0]]]


def doubles(values: Sequence[float]):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_rewards_at_the_end_are_rewards_of_the_sample(advantage):
    """All reward on the last of equally many turns: the same advantages and weights as with credit = sample, groups without
    signal left out of both."""
    samples = [STRIPPED, STRIPPED, STRIPPED, STRIPPED]
    scores = [score(scalar=r, per_turn=[0, 0, 0, r]) for r in (0.0, 1.0, 0.25, 0.0)]
    whole, by_turn = (
        trained_rows([*from_the_wire(samples, scores, credit)[0], Group(9, [Member(i, COMPACTED, 1.0) for i in range(2)])],
                     1, Objective(Algorithm(credit=credit, advantage=advantage), 64))
        for credit in ("sample", "turn"))
    assert len(whole) == len(by_turn) == 12
    for a, b in zip(whole, by_turn, strict=True):
        np.testing.assert_allclose(a.advantages, b.advantages, atol=1e-12)
        assert a.weight == b.weight


def test_token_scores_equal_verls_reinforce_plus_plus():
    """credit = token with the batch as baseline: the return from each token on, whitened over the step's tokens."""
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    scores = [score(scalar=float(v.astype(np.float64).sum()), per_token=v) for v in values]
    found = advantages([COMPACTED] * 3, scores, "token", advantage="reinforce_pp")
    reference, _ = verl().compute_reinforce_plus_plus_outcome_advantage(
        torch.from_numpy(values).double(), torch.ones(3, 5, dtype=torch.float64), Config(gamma=1.0))
    np.testing.assert_allclose([np.concatenate([np.array(a) for a in rows]) for rows in found], reference.numpy(), atol=1e-6)


def test_tokens_that_are_too_old_keep_their_place():
    """Over-lag policy `mask`: the first version's tokens are context, and the later turn's value stays where it was."""
    mixed = segment([0, 1, 1, 0, 1, 1])
    mixed.spans = (Span(1, 0, 1, 2), Span(2, 1, 1, 2))
    [group], _ = from_the_wire([Sample([mixed])], [score(scalar=1, per_turn=[0.25, 0.75])], "turn")
    made = Objective(Algorithm(preset="ppo", credit="turn", gae_lambda=0.5, whiten=False), 64)
    [row] = trained_rows([Group(0, group.members, mask_below_step=1)], 2, made, value=zeros)
    assert row.advantages.tolist() == [0.375, 0.75]


def test_a_kl_term_in_the_reward_lies_on_every_token():
    """With tokens of their own advantages, beta (log mu - log ref) is taken off where it arises."""
    objective = Objective(Algorithm(preset="ppo", kl="k1", kl_in="reward", kl_coefficient=0.5, gae_lambda=0, whiten=False), 64)

    def reference(rows):
        return [dataclasses.replace(row, reference=row.behaviour - np.arange(len(row.index), dtype=np.float32)) for row in rows]

    [row] = trained_rows([Group(0, [Member(0, Sample([segment([0, 1, 1, 1])]), 1.0)])], 1, objective, reference, zeros)
    assert row.advantages.tolist() == [0, -0.5, 1 - 1.0]


def test_an_overlong_answer_pays_on_its_last_token():
    """The penalty joins the reward there."""
    made = Objective(Algorithm(preset="ppo", gae_lambda=0, whiten=False, overlong_margin=4), longest=6)
    [advantages_T] = made.tokens(
        [Episode(np.array([0, 0, 0, 1.0]), np.zeros(4, np.int64), np.zeros(4))], np.zeros(1, int), np.zeros(1, bool)).advantages
    assert advantages_T.tolist() == [0, 0, 0, 0.5]


def test_scores_of_turns_move_the_weights():
    """From scored samples to a step of the learner: two samples of equal reward, spread otherwise, are a batch without signal
    for credit = sample. For credit = turn they train all calls but the first, from which on both brought the same."""
    scores = [score(scalar=1, per_turn=[1, 0, 0, 0]), score(scalar=1, per_turn=[0, 0, 0, 1])]
    for credit, trained in (("sample", 0), ("turn", 6)):
        read, _ = from_the_wire([STRIPPED, STRIPPED], scores, credit)
        metrics = Learner(run_file(algorithm={"credit": credit})).step(read, 1)
        assert metrics["trained_tokens"] == trained and (metrics["grad_norm"] > 0) == bool(trained)


def test_groups_of_equal_rewards_are_not_thrown_away():
    """Their turns may differ: drawing them again is refused, and no alarm counts them as silent."""
    with pytest.raises(ConfigError, match="resample_no_signal = 2 with algorithm.credit = turn: turns may differ"):
        run_file(algorithm={"credit": "turn"}, schedule={"resample_no_signal": 2})
    assert [Objective(Algorithm(credit=credit), 64).compares for credit in ("sample", "turn")] == [True, False]


@pytest.mark.parametrize(("algorithm", "words"), [
    (dict(credit="token"), "token t of one answer cannot be compared with token t of another"),
    (dict(credit="turn", policy_loss="gspo", aggregation="sequence_mean"), "policy_loss = gspo with credit = turn"),
])
def test_credit_without_a_meaning_is_refused(algorithm, words):
    """At the run file, with the reason."""
    with pytest.raises(ConfigError, match=words):
        run_file(algorithm=algorithm)
