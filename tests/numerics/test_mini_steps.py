"""Several optimizer steps on one batch: the split, what each step is, the anchor before them, and routes that stay (R2)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import mini_steps
from services.trainer.learner import Learner
from services.trainer.nonfinite import Skip, together
from services.trainer.packing import Group, Member, Row, trained_rows
from services.trainer.replay import Replay, published, replay
from services.trainer.route_policy import RoutePolicy
from slipstream import rpc, seeds
from slipstream.config import parse
from slipstream.errors import ConfigError, InvalidInput
from slipstream.model import experts_of
from slipstream.objects import FileStore
from slipstream.sample import Sample
from tests.numerics.test_nonfinite import Planted, batch_with_one_bad, forward_is_broken
from tests.numerics.test_routes_training import SHAPE, sampled
from tests.oracles import Config, trl_loss, verl
from tests.trainer_samples import groups, run_file, segment
from tests.unit.test_trainer_loop import Start, lines, train, versions

pytestmark = pytest.mark.slow

DECOUPLED = {"anchor": "recomputed", "correction": "truncated", "correction_high": 1.3}


def made(minibatches: int = 1, epochs: int = 1, family: str = "qwen3_moe", **sections: dict[str, Any]) -> Learner:
    trainer = {"max_grad_norm": 1e9, "minibatches": minibatches, "epochs": epochs, **sections.pop("trainer", {})}
    schedule = {"groups_per_batch": 8, **sections.pop("schedule", {})}
    return Learner(run_file("", family, trainer=trainer, schedule=schedule, **sections))


def batch(count: int = 8, seed: int = 3, step: int = 0) -> list[Group]:
    """Groups of three whose middle sample is average: advantage 0, and yet counted; one more group without signal."""
    found = groups(count, 3, seed, rewards=(0, 0.5, 1), step=step)
    return [*found, Group(99, groups(1, 3, seed + 1, rewards=(1,), step=step)[0].members)]


def parts_of(learner: Learner, given: Sequence[Group], number: int) -> list[list[Row]]:
    rows = trained_rows(given, number, learner.objective, counted=True)
    moving = [row for row in rows if learner.objective.moves(row.advantages)]
    return [mini_steps.part(moving, weights) for weights in mini_steps.plan(rows, learner.objective, learner.run, number)]


def draws(part: Sequence[Row]) -> list[int]:
    return sorted({row.origin[0] for row in part})


def weights(learner: Learner) -> bytes:
    return b"".join(bytes(t.data) for t in learner.weights())


def test_every_pass_takes_each_group_once():
    """Whole groups, sizes apart by one at most, another split in every pass and batch, the same when asked again; a group
    without signal is nowhere; what weighs is counted in its own mini-batch, samples of advantage 0 with it."""
    learner, given = made(3, 2), batch(8)
    parts = parts_of(learner, given, 7)
    passes = [[draws(part) for part in parts[i : i + 3]] for i in (0, 3)]
    for found in passes:
        assert sorted(draw for part in found for draw in part) == list(range(8)) and sorted(map(len, found)) == [2, 3, 3]
    assert passes[0] != passes[1] and [draws(p) for p in parts_of(learner, given, 8)] != passes[0] + passes[1]
    assert [draws(p) for p in parts_of(learner, given, 7)] == passes[0] + passes[1]
    for part in parts:
        tokens = sum(int(m.sample.segments[0].loss_mask.sum()) for g in given[:8] if g.draw in draws(part) for m in g.members)
        assert {row.weight for row in part} == {1 / tokens}, "the middle sample's tokens are counted, and its row is left out"
        assert {row.origin[1] for row in part} == {0, 2}


def test_a_batch_with_fewer_groups_takes_fewer_steps():
    """Two groups with a signal for four mini-batches: two steps. None: nothing moves."""
    learner = made(4)
    assert learner.step(batch(2), 1)["mini_steps"] == 2
    before = weights(learner)
    metrics = learner.step(groups(rewards=(1,)), 2)
    assert metrics["mini_steps"] == metrics["trained_tokens"] == metrics["loss"] == 0 and weights(learner) == before


T = torch.Tensor


def decoupled_verl(pi: T, before: T, mu: T, advantages: T, mask: T) -> T:
    """verl's PPO loss on the ratio to the policy before the batch, times its truncated weight of that policy over the sampler.
    All [B, T]."""
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9, global_batch_info={})
    weight = torch.exp(before - mu).clamp(max=1.3) * mask
    return verl().compute_policy_loss_vanilla(before, pi, advantages, mask, "token-mean", config, weight)[0]


def plain_trl(pi: T, before: T, mu: T, advantages: T, mask: T) -> T:
    """GRPOTrainer's loss with num_iterations > 1, its old log-probabilities those of the sampler."""
    return trl_loss(pi, mu, advantages[:, 0], mask, loss_type="dapo")


def padded(model: Any, given: Sequence[Member]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the answers by one plain forward pass each, those of the sampler, and a mask: three [B, T]."""
    columns: list[list[torch.Tensor]] = [[], [], []]
    for member in given:
        [s] = member.sample.segments
        ids, at = torch.from_numpy(s.tokens).long(), torch.from_numpy(np.flatnonzero(s.loss_mask))
        logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)
        columns[0].append(logprobs[at - 1, ids[at]])
        columns[1].append(torch.from_numpy(s.logprobs).double())
        columns[2].append(torch.ones(len(at), dtype=torch.float64))
    pi, mu, mask = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns)
    return pi, mu, mask


@pytest.mark.parametrize(("algorithm", "oracle"), [(DECOUPLED, decoupled_verl), ({}, plain_trl)])
def test_mini_steps_are_a_plain_loop_of_adamw_steps(algorithm, oracle):
    """Two passes of three mini-batches in double precision: weights equal those of a loop that is written out here, with
    verl's or TRL's loss, torch's AdamW and a forward pass for each sample. What is clipped shows that steps differ."""
    learner = made(3, 2, "gpt2", algorithm=algorithm, trainer={"learning_rate": 1e-2, "eps": 1e-4})  # k.bias has no gradient
    learner.model.double()
    model, given, number = copy.deepcopy(learner.model), batch(7), 5
    settings = learner.run.trainer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    with torch.no_grad():
        before = {g.draw: padded(model, g.members)[0] for g in given}
    for epoch in range(2):
        order = sorted(range(7), key=lambda g: seeds.stream(0, "minibatches", number, epoch, g))
        for part in (order[0::3], order[1::3], order[2::3]):
            members, advantages, anchors = [], [], []
            for g in part:
                rewards = np.array([m.reward for m in given[g].members])
                members += given[g].members
                advantages += ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).astype(np.float32).tolist()
                anchors += [row[: int(m.sample.segments[0].loss_mask.sum())] for row, m in zip(
                    before[g], given[g].members, strict=True)]
            pi, mu, mask = padded(model, members)
            anchor = torch.nn.utils.rnn.pad_sequence(anchors, batch_first=True)
            spread = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(pi)
            oracle(pi, anchor, mu, spread, mask).backward()
            optimizer.step()
            optimizer.zero_grad()
    metrics = learner.step(given, number)
    assert metrics["mini_steps"] == 6 and metrics["clip_share"] > 0 and metrics["k3_last"] != metrics["k3"]
    for (name, ours), theirs in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


TOGETHER: dict[str, dict[str, Any]] = {
    "plain": {}, "balance": {"algorithm": {"balance_coefficient": 0.1, "router_z_coefficient": 0.01}},
    # One row to a micro-batch: the reference is asked of the whole batch at once, and another packing rounds otherwise.
    "kl": {"algorithm": {"kl": "k3", "kl_coefficient": 0.5}, "trainer": {"tokens_per_microbatch": 1}},
    "entropy": {"algorithm": {"entropy_coefficient": 0.1}},
    "sequence mean": {"algorithm": {"aggregation": "sequence_mean"}},
    "per turn": {"algorithm": {"credit": "turn"}},
    "micro-batches": {"trainer": {"tokens_per_microbatch": 40}},
    "lora": {"model": {"lora": {"rank": 2}}},
}


@pytest.mark.parametrize("name", TOGETHER)
def test_mini_steps_are_batches_one_after_the_other(name):
    """Anchored at the sampler, and with advantages of groups, a batch in two parts gives the weights of two batches, bit for
    bit: denominators, counts of the routers' losses, reference, entropy and micro-batches are those of a batch of its own."""
    whole, one = made(2, **TOGETHER[name]), made(1, **TOGETHER[name])
    given = batch()
    for each in (whole, one):
        if each.objective.kl_in_loss:
            each.start_reference()
    for part in parts_of(whole, given, 1):
        one.step([g for g in given if g.draw in draws(part)], 1)
    metrics = whole.step(given, 1)
    assert metrics["mini_steps"] == 2 and weights(whole) == weights(one)
    assert metrics["trained_tokens"] == sum(len(row.index) for part in parts_of(whole, given, 1) for row in part)


@pytest.mark.parametrize("algorithm", [
    {"preset": "ppo"}, {**DECOUPLED, "advantage": "reinforce_pp"}, {"anchor": "interpolated", "correction": "truncated"},
    {"preset": "gspo-moe"}])
def test_others_learn_in_several_steps(algorithm):
    """A critic (updated once on the whole batch), whitening over the batch, an interpolated anchor, sequence ratios."""
    learner, before = made(2, 2, algorithm=algorithm), None
    for step in (1, 2):
        metrics = learner.step(batch(step=step - 1), step)
        assert metrics["mini_steps"] == 4 and metrics["grad_norm"] > 0 and weights(learner) != before
        before = weights(learner)
    assert (learner.critic is not None) == (metrics.get("value_loss") is not None)


def test_figures_say_which_step_they_are_of():
    """Before the batch: the gap to the sampler, over all tokens with a recomputed anchor, over the first part's without. Over
    all steps: the share that is clipped, by the ratio that is. Of the last: how far it came."""
    given = batch()
    one, asked, first = made(1), made(2, 3, algorithm=DECOUPLED), made(2, 3)
    alone = one.step(given, 1)
    every, some = asked.step(given, 1), first.step(given, 1)
    for name in ("gap_mean", "k3", "ess", "ratio_max"):
        assert every[name] == pytest.approx(alone[name], rel=1e-5), name
        assert some[name] != pytest.approx(alone[name], rel=1e-5), name
    assert (every["mini_steps"], some["mini_steps"], alone["mini_steps"]) == (6, 6, 1)
    assert "k3_last" not in alone and every["clip_share_last"] > every["clip_share"] > 0
    [steady] = [made(2, 3, algorithm=DECOUPLED, trainer={"learning_rate": 1e-12}).step(given, 1)]
    assert steady["clip_share"] == 0 < steady["gap_mean"], "the ratio is to the policy before the batch, not to the sampler"


def test_a_part_that_is_not_finite_is_left_out_and_the_others_stand():
    """The weights are those of the other part alone; the sample and the part are named; the moments do not know of it."""
    learner, other, given = made(2), made(1), batch_with_one_bad()
    parts = parts_of(learner, given, 1)
    [bad] = [i for i, part in enumerate(parts, 1) if 2 in draws(part)]
    handle = learner.model.get_input_embeddings().register_forward_hook(forward_is_broken)
    metrics = learner.step(given, 1)
    handle.remove()
    other.step([g for g in given if g.draw in draws(parts[2 - bad])], 1)
    assert metrics["skipped"] == metrics["mini_steps"] == metrics["nonfinite_samples"] == 1 and np.isfinite(metrics["loss"])
    assert learner.skip is not None and learner.skip.part == f"mini-step {bad} of 2"
    assert [(c.draw, c.sample) for c in learner.skip.culprits] == [(2, 3)]
    assert weights(learner) == weights(other)
    assert learner.step(batch(step=1), 2)["skipped"] == 0 and learner.skip is None


def test_what_is_malformed_is_refused_before_the_first_step():
    """Wherever it lies: nothing of the batch is applied."""
    learner = made(4)
    before = weights(learner)
    for draw in range(4):
        given = groups()
        given[draw].members[0].sample.segments[0].tokens[0] = 9999
        with pytest.raises(InvalidInput, match="outside of the model's"):
            learner.step(given, 1)
    assert weights(learner) == before and learner.optimizer.state == {}


def keeping(learner: Learner) -> list[list[torch.Tensor]]:
    """From now on, the experts of every forward pass, sorted: a list of layers for each."""
    layers = experts_of(learner.model)
    passes: list[list[torch.Tensor]] = []

    def keep(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is layers[0]:
            passes.append([])
        passes[-1].append((args[1] if len(args) > 1 else kwargs["top_k_index"]).detach().sort(-1).values)

    for module in layers:
        module.register_forward_pre_hook(keep, with_kwargs=True)
    return passes


def moe(mode: str, minibatches: int = 1, epochs: int = 1, **sections: dict[str, Any]) -> Learner:
    build = {"model_type": "qwen3_moe", "tokenizer_chars": "0123456789=", "config": SHAPE}
    trainer = {"learning_rate": 3e-2, **sections.pop("trainer", {})}
    algorithm = {"route_replay": mode, **sections.pop("algorithm", {})}
    return made(minibatches, epochs, "qwen3_moe", model={"build": build}, algorithm=algorithm, trainer=trainer, **sections)


def even(count: int = 8) -> list[Group]:
    """Groups whose rows are equally long: no padding, which would route itself."""
    random = np.random.default_rng(5)

    def member(i: int, reward: float) -> Member:
        ids = [*random.integers(2, 12, 4), 12, *random.integers(2, 12, 6), 1]
        return Member(i, Sample([segment(ids[:5], ids[5:], (-random.uniform(1, 4, 7)).tolist())]), reward)

    return [Group(draw, [member(i, i % 2) for i in range(4)]) for draw in range(count)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("anchor", [{}, DECOUPLED])
def test_own_routes_stay_while_the_router_moves(anchor):
    """No routes come from the sampler. Every mini-step sends each token where the pass before them did, though the live router
    would not any more; without replay it goes where that says. One more batch is routed by the router as it is by then."""
    learner, live, given = moe("trainer", epochs=3, algorithm=anchor), moe("none", epochs=3, algorithm=anchor), even()
    kept, free = keeping(learner), keeping(live)
    metrics = learner.step(given, 1)
    live.step(given, 1)
    assert len(kept) == 4 and all(equal(kept[0], found) for found in kept[1:])
    assert equal(kept[0], free[0]) and not equal(free[0], free[-1])
    assert 0 < metrics["route_flip_share"] < 0.9 and metrics["route_gap"] < 1e-5 and metrics["route_gap_live"] is None
    learner.step(given, 2)
    assert not equal(kept[4], kept[0]) and all(equal(kept[4], found) for found in kept[5:])


def test_own_routes_of_the_first_step_are_the_step_without_replay():
    """Its weights are those that chose them: in each part's first step nothing flips, to the bit, whatever the packing."""
    seen: list[list[torch.Tensor]] = []
    for mode in ("trainer", "none"):
        learner, found = moe(mode, 2, trainer={"tokens_per_microbatch": 64}), []

        def look(*_: Any, model: Any = learner.model, found: list[torch.Tensor] = found) -> None:
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))

        learner.optimizer.register_step_pre_hook(look)
        learner.step(batch(), 1)
        seen.append(found)
    assert torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("wrong", [lambda r: np.roll(r, 1, axis=0), lambda r: r[:, [1, 0, 2]]])
def test_own_routes_of_other_tokens_or_layers_are_caught(wrong, monkeypatch):
    """A fault of ours, planted: off by a token, two layers swapped, in all rows but the longest. The first mini-step finds it,
    and nothing is applied, nor left of the micro-batches before."""
    recorded = RoutePolicy.recorded

    def shifted(self: RoutePolicy, *arguments: Any) -> Any:
        logprobs, routes = recorded(self, *arguments)
        return logprobs, [r if len(r) == longest else wrong(r) for r in routes]

    monkeypatch.setattr(RoutePolicy, "recorded", shifted)
    learner, given = moe("trainer", 2, trainer={"tokens_per_microbatch": 1}), batch()
    longest = max(len(row.inputs) for row in parts_of(learner, given, 1)[0])
    before = weights(learner)
    with pytest.raises(InvalidInput) as caught:
        learner.step(given, 1)
    assert caught.value.reason == "ROUTES_MISALIGNED" and "a fault of the trainer" in caught.value.message
    assert weights(learner) == before and all(p.grad is None for p in learner.model.parameters())


def test_the_samplers_routes_hold_in_every_step():
    """R3: they are taken in the pass before the mini-steps and in all of these; routes that cannot be of this model are refused
    before the first of them."""
    learner = moe("auto", 1, 2, algorithm=DECOUPLED, rollout={"capture_routes": True})
    given = sampled(learner, even())
    kept = keeping(learner)
    metrics = learner.step(given, 1)
    passes = [found for found in kept if found[0].shape == kept[-1][0].shape]  # the replay's own proof is shorter
    assert metrics["route_gap"] is not None and metrics["mini_steps"] == 2 and metrics["route_flip_share"] > 0.01
    assert len(passes) == 4 and [equal(passes[-1], found) for found in passes] == [True, True, False, True], \
        "before, the first step, the check without replay, the second step"
    given = sampled(learner, batch())
    last = given[-2].members[0].sample.segments[0]
    given[-2].members[0].sample.segments[0] = replace(last, routes=np.zeros_like(last.routes))  # pyright: ignore
    other = moe("auto", 4, rollout={"capture_routes": True})
    before = weights(other)
    with pytest.raises(InvalidInput, match="draw 7, sample 0: its routes name an expert twice"):
        other.step(given, 2)
    assert weights(other) == before


@pytest.mark.parametrize(("sections", "words"), [
    (dict(trainer={"minibatches": 5}), "minibatches = 5 exceeds schedule.groups_per_batch = 4: .* of whole groups"),
    (dict(algorithm={"route_replay": "trainer"}), "with one optimizer step per batch the earlier pass is that step's own"),
    (dict(algorithm={"route_replay": "trainer"}, trainer={"epochs": 2}, rollout={"capture_routes": True}), "and never used"),
    (dict(trainer={"epochs": 2}, environments=(), sft={"path": "rows.jsonl"}), "set sft.rows and sft.epochs instead"),
])
def test_settings_without_a_use_are_refused(sections, words):
    """At the run file, with the fields and what to do."""
    data = run_file().model_dump(mode="json")
    for name, values in sections.items():
        data[name] = {**data[name], **values} if name in ("trainer", "algorithm", "rollout") else values
    with pytest.raises(ConfigError, match=words):
        parse(data)


def test_a_model_without_experts_has_no_routes_to_keep():
    """A configuration error at the start, not a warning: it was asked for."""
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no experts"):
        made(1, 2, "gpt2", algorithm={"route_replay": "trainer"})


async def test_run_resume_and_replay_agree(tmp_path: Path):
    """A batch in four steps is one version, one commit, one step of the run; a trainer that is stopped and resumed comes to
    the same weights, and a replay of the log to every published version. Batch 2 is skipped whole: a record is NaN."""
    settings: dict[str, Any] = {
        "trainer": {"minibatches": 2, "epochs": 2}, "algorithm": {"route_replay": "trainer", **DECOUPLED}}
    whole, parts = Planted(), Planted()  # pyright: ignore[reportAbstractUsage]
    assert await train(whole, run_file(str(tmp_path / "whole"), **settings)) == 0
    assert [e[1] for e in whole.kinds("commit")] == [2, 4] and [e[1] for e in whole.kinds("publish")] == [0, 1, 2, 3, 4]
    found = await versions(whole, tmp_path / "whole")
    told = lines(tmp_path / "whole" / "metrics.jsonl")
    assert [line["mini_steps"] for line in told] == [4, 0, 4, 4] and [line["skipped"] for line in told] == [0, 1, 0, 0]

    run = run_file(str(tmp_path / "parts"), **{**settings, "trainer": {**settings["trainer"], "checkpoint_every": 100}})
    async with rpc.Server("127.0.0.1", 0, parts.registrations) as server:
        first = Start(run, server.address)
        parts.on_event = lambda e: first.lifecycle.request_stop("SIGTERM") if e[:2] == ("publish", 1) else None
        parts.gate = lambda batch: "held" if batch > 1 else ""
        assert await first.code == 0
        parts.gate = lambda batch: ""
        assert await Start(run, server.address).code == 0
    assert await versions(parts, tmp_path / "parts") == found

    store = FileStore(tmp_path / "whole" / "objects")
    await whole.log(store)
    report = await replay(
        Replay(run_file(str(tmp_path / "whole"), **settings), store), await published(tmp_path / "whole", store), 4,
        lambda text: None)
    assert report.sentence == "replayed 4 batches, 4 versions equal"


def test_a_skip_in_part_is_told_as_one():
    """Its part is in the sentence of the log and in the record; the whole batch has none."""
    assert together([(2, Skip(())), (3, Skip(()))], 4).part == "mini-step 2, 3 of 4"
    assert together([(1, Skip((), "lm_head.weight"))], 1) == Skip([], "lm_head.weight")
