"""PPO's critic: values and advantages against verl in double precision, and what a checkpoint must hold of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.objective import Episode, Objective
from services.trainer.critic import Critic
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, microbatches, trained_rows
from slipstream.config import Algorithm, parse
from slipstream.errors import ConfigError, InvalidInput
from slipstream.sample import FINISH_LENGTH, Sample, Segment, Span
from tests.oracles import verl
from tests.trainer_samples import FAMILIES, groups, run_file, segment


def learner(family: str = "qwen3_moe", critic: dict[str, Any] | None = None, **algorithm: Any) -> Learner:
    return Learner(run_file(
        family=family, algorithm={"preset": "ppo", **algorithm},
        critic={"learning_rate": 1e-3, **(critic or {})}))


def exact(tokens_per_microbatch: int = 10_000, **critic: Any) -> Learner:
    """In double precision, with gradients as they come and a head that is not zero."""
    made = Learner(run_file(
        family="gpt2", algorithm={"preset": "ppo"}, critic={"max_grad_norm": 1e9, **critic},
        trainer={"max_grad_norm": 1e9, "tokens_per_microbatch": tokens_per_microbatch}))
    assert made.critic is not None
    made.model.double()
    made.critic.model.double()
    with torch.no_grad():
        made.critic.model.head.weight.copy_(torch.linspace(-1, 1, 32)[None])
    return made


def gradients(made: Learner, batch: list[Group]) -> dict[str, torch.Tensor]:
    """Of the policy and of the critic's first update, before clipping."""
    assert made.critic is not None
    seen: dict[str, torch.Tensor] = {}
    for name, model, optimizer in (("", made.model, made.optimizer), ("critic.", made.critic.model, made.critic.optimizer)):
        optimizer.register_step_pre_hook(lambda *_, name=name, model=model: seen.update(
            {name + n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and name + n not in seen}))
    made.step(batch, 1)
    return seen


def conversation(rewards: np.ndarray | None = None) -> Sample:
    """Two answers with a tool's three tokens between them, in one segment."""
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], bool)
    tokens = np.array([2, 3, 4, 5, 12, 6, 7, 8, 9, 1], np.int32)
    return Sample([Segment(tokens, mask, np.linspace(-2, -1, 5).astype(np.float32), (Span(1, 0, 1, 5),))])


@pytest.mark.parametrize("whiten", [True, False])
def test_advantages_equal_verls_from_the_sample_on(whiten):
    """A batch of answers and of a conversation with a tool: from samples and rewards to each token's advantage and
    return. Equal to compute_gae_advantage_return over padded matrices whose mask leaves the tool's tokens out."""
    made = exact()
    assert made.critic is not None
    batch = [*groups(3, seed=3), Group(9, [Member(0, conversation(), 1.0), Member(1, conversation(), 0.0)])]
    settings = Algorithm(preset="ppo", gamma=0.98, gae_lambda=0.9, whiten=whiten)
    rows = trained_rows(batch, 1, Objective(settings, 64), value=made.critic.valued)
    samples = [m.sample.segments[0] for g in batch for m in g.members]
    width = max(len(s.tokens) for s in samples)
    rewards, values, mask = (torch.zeros(len(samples), width, dtype=torch.float64) for _ in range(3))
    for i, (s, member) in enumerate(zip(samples, (m for g in batch for m in g.members), strict=True)):
        with torch.no_grad():
            hidden = made.critic.model.backbone(input_ids=torch.from_numpy(s.tokens).long()[None]).last_hidden_state
            values[i, 1 : len(s.tokens)] = made.critic.model.head(hidden)[0, :-1, 0]
        mask[i, : len(s.tokens)] = torch.from_numpy(s.loss_mask)
        rewards[i, int(np.flatnonzero(s.loss_mask)[-1])] = member.reward
    advantages, returns = verl().compute_gae_advantage_return(rewards, values, mask, 0.98, 0.9)
    expected = advantages if whiten else returns - values
    assert len(rows) == len(samples)
    for i, row in enumerate(rows):
        at = mask[i].bool().numpy()
        np.testing.assert_allclose(row.values, values[i].numpy()[at], atol=1e-10)
        np.testing.assert_allclose(row.returns, returns[i].numpy()[at], atol=1e-10)
        np.testing.assert_allclose(row.advantages, expected[i].numpy()[at], atol=1e-9)


def test_the_gradient_of_policy_and_critic_is_the_same_for_any_micro_batching():
    """Denominators are of the step: one, a few or many micro-batches, and the groups in another order, 1e-12 in fp64."""
    batch = groups(5, seed=2, rewards=(0, 0.5, 1, 0.2))
    reference = gradients(exact(), batch)
    assert any(n.startswith("critic.backbone") and g.abs().max() > 1e-4 for n, g in reference.items())
    for budget, given in ((1, batch), (40, batch), (40, batch[::-1])):
        found = gradients(exact(budget), given)
        assert found.keys() == reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_the_critics_loss_is_verls_with_the_clip_around_the_values_before_the_step():
    """Three updates on one batch: the second and third start from a moved critic, whose values are clipped around those of
    before the first. Loss and clip share of the third equal compute_value_loss."""
    made = exact(updates=3, learning_rate=1e-2, clip=0.05)
    assert made.critic is not None
    rows = trained_rows(groups(3, seed=4), 1, made.objective, value=made.critic.valued)
    [batch] = microbatches(rows, 10_000)
    twice = exact(updates=2, learning_rate=1e-2, clip=0.05)
    assert twice.critic is not None
    twice.critic.update(rows, 1)
    with torch.no_grad():
        moved = twice.critic.model(torch.from_numpy(batch.inputs), torch.from_numpy(batch.index))
    ones = torch.ones(1, len(moved), dtype=torch.float64)
    loss, _ = verl().compute_value_loss(
        moved[None], torch.from_numpy(batch.returns)[None], torch.from_numpy(batch.values)[None], ones, 0.05)
    metrics = made.critic.update(rows, 1)
    assert metrics["value_loss"] == pytest.approx(loss.item(), abs=1e-12)
    outside = (moved - torch.from_numpy(batch.values)).abs() > 0.05
    assert (metrics["value_clip_share"] or 0) > 0
    assert metrics["value_clip_share"] == pytest.approx(outside.double().mean().item())


def test_every_sample_counts_though_its_group_has_equal_rewards():
    """Nothing is compared within a group: a group of one, or one whose rewards are equal, trains policy and critic."""
    made = learner()
    batch = [Group(g.draw, g.members[:1]) for g in groups(4, rewards=(1,))]
    assert made.step(batch, 1)["trained_tokens"] == sum(m.sample.generated_tokens for g in batch for m in g.members)


def test_truncated_answers_are_left_out_of_the_critic_too():
    """mask_truncated: the same policy, critic and whitening as if they had not been in the batch."""
    batch = groups(3, seed=5)
    cut = batch[0].members[0]
    cut.sample.finish_reason = FINISH_LENGTH
    rest = [Group(0, batch[0].members[1:]), *batch[1:]]
    with_it, without = learner(mask_truncated=True), learner()
    with_it.step(batch, 1)
    without.step(rest, 1)
    for a, b in zip(all_parameters(with_it), all_parameters(without), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def all_parameters(made: Learner) -> list[torch.Tensor]:
    assert made.critic is not None
    return [*made.model.parameters(), *made.critic.model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_critic_learns_what_answers_are_worth_in_every_family(family):
    """Prompts whose answers are right and prompts whose answers are wrong: its values come to explain which is which."""
    made = learner(family, {"learning_rate": 1e-2, "updates": 4}, gae_lambda=1.0)
    batch = [Group(k, groups(1, 2, seed=20 + k, rewards=(k % 2,))[0].members) for k in range(4)]
    found = [made.step(batch, step) for step in range(1, 9)]
    assert found[0]["explained_variance"] == pytest.approx(0, abs=1e-9), "the head starts at zero"
    assert found[-1]["explained_variance"] > 0.5
    assert found[-1]["value_loss"] < found[0]["value_loss"] / 2
    assert found[-1]["critic_grad_norm"] > 0 and found[-1]["value_skipped"] == 0


def test_the_policy_waits_for_the_critics_warm_up():
    """For `critic.warmup_steps` steps the critic alone moves; then both."""
    made = learner(critic={"warmup_steps": 2})
    assert made.critic is not None
    for step, waits in ((1, True), (2, True), (3, False)):
        policy, values = made.weights(), [p.clone() for p in made.critic.model.parameters()]
        made.step(groups(seed=step, step=step - 1), step)
        assert all(bytes(a.data) == bytes(b.data) for a, b in zip(policy, made.weights(), strict=True)) == waits
        assert any(not torch.equal(a, b) for a, b in zip(values, made.critic.model.parameters(), strict=True))


def test_a_resume_goes_on_bit_for_bit():
    """Snapshot after two steps, two steps more; another process loads it and takes the same two: policy, critic and both
    optimizers are equal. Without the critic's part they would not be."""
    first = learner(critic={"updates": 2})
    for step in (1, 2):
        first.step(groups(seed=step, step=step - 1), step)
    saved = first.snapshot()
    assert saved.critic and len(saved.critic_optimizer) == 3 * len(saved.critic)
    found = [saved.weights, saved.critic]
    second, forgetful = learner(critic={"updates": 2}), learner(critic={"updates": 2})
    second.load(saved)
    forgetful.load(dataclasses.replace(saved, critic={}, critic_optimizer={}))
    for made in (first, second, forgetful):
        for step in (3, 4):
            made.step(groups(seed=step, step=step - 1), step)
    found = [made.snapshot() for made in (first, second, forgetful)]
    for part in ("weights", "optimizer", "critic", "critic_optimizer"):
        one, two, three = (getattr(snapshot, part) for snapshot in found)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
        assert any(not torch.equal(one[name], three[name]) for name in one)


def test_the_critic_starts_as_the_policy_after_the_warm_up():
    """Its backbone takes the policy's weights when the warm-up ends, and when a run without critic is forked into one."""
    made = learner()
    assert made.critic is not None
    with torch.no_grad():
        made.model.get_input_embeddings().weight.add_(0.5)
    made.start_rl(keep_optimizer=True)
    forked = learner()
    assert forked.critic is not None
    forked.load(dataclasses.replace(made.snapshot(), critic={}, critic_optimizer={}))
    for critic in (made.critic, forked.critic):
        assert torch.equal(critic.model.backbone.get_input_embeddings().weight, made.model.get_input_embeddings().weight)
        assert critic.model.backbone.get_input_embeddings().weight is not made.model.get_input_embeddings().weight


def test_a_critic_of_another_size_is_refused_before_anything_is_written():
    """A checkpoint whose critic does not fit leaves policy and critic as they were."""
    made, saved = learner(), learner().snapshot()
    before = [p.clone() for p in all_parameters(made)]
    saved.weights["lm_head.weight"] = saved.weights["lm_head.weight"] + 1
    saved.critic["head.weight"] = torch.zeros(1, 7)
    with pytest.raises(InvalidInput, match=r"head.weight: shape \[1, 7\]"):
        made.load(saved)
    assert all(torch.equal(a, b) for a, b in zip(before, all_parameters(made), strict=True))


def test_a_critic_that_overflows_skips_its_own_step_only():
    """A return that is not finite in the critic leaves the critic as it is, says so in a metric, and the run goes on."""
    made = learner()
    assert made.critic is not None
    rows = trained_rows(groups(), 1, made.objective, value=made.critic.valued)
    before = [p.clone() for p in made.critic.model.parameters()]
    broken = [dataclasses.replace(row, returns=np.full(len(row.index), np.inf)) for row in rows]
    assert made.critic.update(broken, 1)["value_skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, made.critic.model.parameters(), strict=True))


def test_segments_are_joined_in_the_order_of_the_calls():
    """A sample of two segments (compaction): the second goes on where the first ended, so its reward reaches the first's tokens
    through the critic's values, and only the last token has it."""
    objective = Objective(Algorithm(preset="ppo", whiten=False, gae_lambda=0.5), 64)
    values = iter([0.5, 0.25])

    def value(rows):
        return [dataclasses.replace(row, values=np.full(len(row.index), next(values))) for row in rows]

    sample = Sample([segment([2, 3], [4, 5]), segment([2, 6], [7])])
    rows = trained_rows([Group(0, [Member(0, sample, 1.0)])], 1, objective, value=value)
    last = 1 - 0.25
    second = 0.25 - 0.5 + 0.5 * last
    assert [row.advantages.tolist() for row in rows] == [[pytest.approx(0.5 * second), pytest.approx(second)], [last]]
    assert [row.outcomes.tolist() for row in rows] == [[1, 1], [1]]


@pytest.mark.parametrize(("sections", "words"), [
    (dict(critic={"learning_rate": 1e-4}), "critic.learning_rate = 0.0001 with algorithm.advantage = grpo: there is no critic"),
    (dict(algorithm={"gamma": 0.9}), "gamma = 0.9 with advantage = grpo: only gae"),
    (dict(algorithm={"whiten": False}), "whiten = False with advantage = grpo"),
    (dict(algorithm={"preset": "ppo", "policy_loss": "gspo", "aggregation": "sequence_mean"}), "set policy_loss = gspo_token"),
    (dict(algorithm={"preset": "ppo"}, schedule={"resample_no_signal": 3}), "resample_no_signal = 3 with algorithm.adv"),
])
def test_contradictions_are_refused_with_the_reason(sections, words):
    """At the run file, before anything starts. A run file that was resolved once is read again as it is."""
    with pytest.raises(ConfigError) as error:
        run_file(**sections)
    assert words in error.value.message
    run = run_file(algorithm={"preset": "ppo"}, critic={"clip": 0.2}, schedule={"group_size": 1})
    assert parse(run.model_dump(mode="json")) == run


def test_a_critic_of_its_own_directory(tmp_path):
    """`critic.path`: another model's backbone, which the policy's weights do not replace."""
    other = Learner(run_file(run={"seed": 7}))
    other.save_pretrained(tmp_path)
    made = learner(critic={"path": str(tmp_path)})
    made.start_rl(keep_optimizer=True)
    assert isinstance(made.critic, Critic)
    torch.testing.assert_close(
        made.critic.model.backbone.get_input_embeddings().weight, other.model.get_input_embeddings().weight)


def test_a_sample_without_a_trained_token_is_nowhere():
    """All its tokens are too old: no row, no count, and no trouble for the others."""
    terms = Objective(Algorithm(preset="ppo"), 64).tokens(
        [Episode(np.zeros(0), np.zeros(0, np.int64), np.zeros(0)),
         Episode(np.array([0.0, 1.0]), np.zeros(2, np.int64), np.zeros(2))],
        np.array([0, 0]), np.zeros(2, bool))
    assert terms.weights.tolist() == [0, 0.5] and len(terms.advantages[0]) == 0
