"""On-policy distillation: the advantage of a token against TRL's own divergence, and a student that comes to its teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.objective import LossInputs, Objective
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, microbatches, trained_rows
from slipstream.config import Algorithm
from slipstream.errors import ConfigError
from slipstream.sample import Sample
from tests.oracles import trl_divergence
from tests.trainer_samples import groups, run_file, segment


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same family and vocabulary with other, more decided weights."""
    folder = tmp_path_factory.mktemp("teacher")
    made = Learner(run_file(family="gpt2", run={"seed": 7}))
    with torch.no_grad():
        made.model.get_output_embeddings().weight.mul_(1.5)
    made.save_pretrained(folder)
    return folder


def learner(teacher: Path, **algorithm: Any) -> Learner:
    return Learner(run_file(family="gpt2", algorithm={"teacher": str(teacher), **algorithm}, trainer={"max_grad_norm": 1e9}))


def test_the_expected_gradient_is_trls_reverse_kl():
    """Every token of a vocabulary of five as if it had been sampled, weighted with its probability: the policy gradient of our
    advantages is the gradient of GKDTrainer's generalized_jsd_loss with beta = 1, the KL of student and teacher, to 1e-12."""
    make = torch.Generator().manual_seed(1)
    student, taught = (torch.randn(1, 3, 5, generator=make, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    expected = torch.autograd.grad(trl_divergence(student, taught, beta=1.0), student)[0]
    logprobs = torch.log_softmax(student, -1).reshape(-1)
    advantages = (torch.log_softmax(taught, -1).reshape(-1) - logprobs).detach()
    zeros = torch.zeros(15, dtype=torch.long)
    loss = Objective(Algorithm(preset="grpo"), 64).loss(LossInputs(
        logprobs, torch.zeros(15), logprobs.detach(), advantages, logprobs.detach().exp(), zeros, zeros))
    [found] = torch.autograd.grad(loss, student)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("advantage", ["none", "grpo", "gae"])
def test_the_teachers_word_is_added_to_each_token(teacher, advantage):
    """coefficient (log pi_T - log mu), pi_T by a plain transformers forward of each sequence alone; beside the reward's
    advantage, after whitening; groups with equal rewards have only the teacher's."""
    made = learner(teacher, advantage=advantage, teacher_coefficient=0.5)
    batch = [*groups(3, seed=3), Group(9, groups(1, seed=8, rewards=(1,))[0].members)]
    plain = trained_rows(batch, 1, made.objective, value=made._valued if made.critic else None)
    assert made._teacher is not None and len(plain) == 16
    rows = made._teacher.taught(plain)
    gaps = []
    for row, before in zip(rows, plain, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(np.append(row.inputs, row.targets[-1])).long()
            logprobs = torch.log_softmax(made._teacher._scorer._model(input_ids=ids[None]).logits[0].double(), -1)
        gap = np.array([logprobs[i, t] for i, t in zip(row.index, row.targets, strict=True)]) - row.behaviour
        gaps.append(gap)
        np.testing.assert_allclose(row.advantages, before.advantages + 0.5 * gap, atol=1e-5)
        assert not before.advantages.any() or advantage != "none"
    if advantage == "grpo":
        assert all(not row.advantages.any() for row in plain[12:]) and all(row.advantages.any() for row in plain[:12])
    assert made._teacher.metrics()["teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-5)


def sampled(made: Learner, count: int, seed: int) -> list[Group]:
    """The student's own answers of four tokens to prompts of one digit, with their log-probabilities."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 12, (count, 1), generator=random)
    found = []
    with torch.no_grad():
        for _ in range(4):
            logprobs = torch.log_softmax(made.model(input_ids=tokens).logits[:, -1], -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=random)
            found.append(logprobs.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
    behaviour = torch.cat(found, 1).numpy()
    return [Group(i, [Member(0, Sample([segment(row[:1], row[1:], logprobs)]), 0.0)])
            for i, (row, logprobs) in enumerate(zip(tokens.tolist(), behaviour, strict=True))]


def test_a_student_comes_to_its_teacher(teacher):
    """Twenty steps on its own samples, every reward 0: the reverse KL to the teacher falls, by the metric to less than half, by
    the exact sum over the vocabulary to less than a third."""
    run = run_file(family="gpt2", algorithm={"advantage": "none", "teacher": str(teacher)},
                   schedule={"group_size": 1}, trainer={"learning_rate": 1e-2})
    made = Learner(run)
    assert made._teacher is not None
    model = made._teacher._scorer._model

    def exact() -> float:
        [batch] = microbatches(trained_rows(sampled(made, 64, 99), 1, made.objective), 10_000)
        with torch.no_grad():
            ids = torch.from_numpy(batch.inputs)
            pi, taught = (torch.log_softmax(m(input_ids=ids).logits, -1) for m in (made.model, model))
        return float((pi.exp() * (pi - taught)).sum(-1).mean())

    before, metrics = exact(), []
    for step in range(1, 21):
        metrics.append(made.step(sampled(made, 64, step), step))
    assert metrics[0]["trained_tokens"] == 256 and metrics[0]["reward_mean"] == 0
    assert exact() < before / 3
    assert np.mean([m["teacher_kl"] for m in metrics[-3:]]) < np.mean([m["teacher_kl"] for m in metrics[:3]]) / 2


def test_the_teacher_stays_as_it_is_and_out_of_checkpoints(teacher):
    """Neither its weights move, nor are they in a snapshot or in a version."""
    made = learner(teacher, advantage="none")
    assert made._teacher is not None
    before = [p.clone() for p in made._teacher._scorer._model.parameters()]
    names = {t.name for t in made.weights()}
    made.step(groups(seed=1), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, made._teacher._scorer._model.parameters(), strict=True))
    assert {t.name for t in made.weights()} == names == set(made.snapshot().weights)


def test_a_teacher_needs_the_same_vocabulary(teacher, tmp_path):
    """Other tokens cannot be judged; a directory without a model is told by the setting's name."""
    data = run_file(family="gpt2").model_dump(mode="json")
    data["model"]["build"]["tokenizer_chars"] = "0123456789+"
    run = run_file(family="gpt2", model=data["model"], algorithm={"teacher": str(teacher)})
    with pytest.raises(ConfigError, match="take a teacher of the same vocabulary"):
        Learner(run)
    with pytest.raises(ConfigError, match="algorithm.teacher = .* has no weights"):
        learner(tmp_path)


@pytest.mark.parametrize(("sections", "words"), [
    (dict(algorithm={"advantage": "none"}), "advantage = none without teacher"),
    (dict(algorithm={"teacher_coefficient": 0.5}), "teacher_coefficient = 0.5 without teacher"),
    (dict(algorithm={"advantage": "none", "teacher": "t", "credit": "turn"}), "credit = turn with advantage = none"),
    (dict(algorithm={"advantage": "none", "teacher": "t", "overlong_margin": 4}), "overlong_margin = 4 with advantage = none"),
    (dict(algorithm={"advantage": "none", "teacher": "t", "kl": "k1", "kl_in": "reward"}), "kl_in = reward with adv"),
    (dict(algorithm={"preset": "gspo-moe", "teacher": "t"}), "policy_loss = gspo with a teacher"),
    (dict(algorithm={"teacher": "t"}, schedule={"resample_no_signal": 2}), "a teacher teaches on groups with equal rewards"),
])
def test_contradictions_are_refused_with_the_reason(sections, words):
    """At the run file, before anything starts."""
    with pytest.raises(ConfigError) as error:
        run_file(**sections)
    assert words in error.value.message


def test_rows_that_nothing_shaped_take_the_teachers_word(teacher):
    """taught() on rows without advantages starts from zero: what it adds is all."""
    made = learner(teacher)
    assert made._teacher is not None
    rows = [dataclasses.replace(row, advantages=np.zeros(0)) for row in trained_rows(groups(1, seed=2), 1, made.objective)]
    assert all(row.advantages.any() for row in made._teacher.taught(rows))
