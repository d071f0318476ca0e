"""Auxiliary losses of the routers: transformers' own functions on the whole batch are the oracle, however the batch is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from services.trainer.balance import Balance, balance_part, z_part
from services.trainer.expert_load import ExpertLoad
from services.trainer.learner import Learner
from services.trainer.packing import microbatches, trained_rows
from services.trainer.ranks import Alone
from slipstream.config import RunFile
from slipstream.errors import ConfigError
from tests.numerics.test_routes import tiny
from tests.trainer_samples import FAMILIES, OBJECTIVE, groups, run_file

TOKENS, EXPERTS, TOP_K = 48, 8, 2


def counts(logits: torch.Tensor) -> torch.Tensor:
    return torch.bincount(logits.topk(TOP_K, -1).indices.reshape(-1), minlength=EXPERTS)


@pytest.mark.parametrize("cuts", [[], [16, 32], [1, 5, 6, 40], list(range(1, TOKENS))])
def test_parts_of_any_cut_are_the_whole(cuts):
    """Values and gradients, in double precision to 1e-12, of equal and unequal parts; the mean of the parts' own losses, for
    comparison, is another loss."""
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assigned = counts(logits)
    whole = balance_part(logits, assigned, TOKENS) + z_part(logits, TOKENS)
    [expected] = torch.autograd.grad(whole, logits)
    parts = torch.tensor_split(logits, cuts)
    total = sum((balance_part(p, assigned, TOKENS) + z_part(p, TOKENS) for p in parts), torch.zeros(()).double())
    [found] = torch.autograd.grad(total, logits)
    assert abs(float((total - whole).detach())) < 1e-12 and float((found - expected).abs().max()) < 1e-12
    if cuts == [16, 32]:
        local = torch.stack([balance_part(p, counts(p), len(p)) for p in torch.tensor_split(logits, cuts)]).mean()
        assert abs(float((local - balance_part(logits, assigned, TOKENS)).detach())) > 0.01


def test_one_layer_equals_transformers():
    """load_balancing_loss_func and router_z_loss_func, values and gradients."""
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for ours, theirs in (
            (balance_part(logits, counts(logits), TOKENS), load_balancing_loss_func((logits,), EXPERTS, TOP_K)),
            (z_part(logits, TOKENS), router_z_loss_func(logits[None]))):
        [a], [b] = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)  # pyright: ignore
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


def run(family: str = "qwen3_moe", budget: int = 10_000, **algorithm: Any) -> RunFile:
    return run_file(family=family, algorithm=algorithm, trainer={
        "tokens_per_microbatch": budget, "max_grad_norm": 1e9, "learning_rate": 1e-9})


def gradients(made: Learner, batch: list[Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    seen: dict[str, torch.Tensor] = {}
    made.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}))
    return seen, made.step(batch, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_the_trainer_the_whole_batch_counts(family):
    """Through the model: micro-batches with padding give the balance that transformers computes, layer by layer, on the whole
    batch without padding, and the gradients of the step in one piece. The policy's own loss is left as it was."""
    settings: dict[str, Any] = {"balance_coefficient": 0.1, "router_z_coefficient": 0.01}
    batch = groups(seed=9)
    made = Learner(run(family, **settings))
    logits: list[list[torch.Tensor]] = [[], []]
    for row in trained_rows(batch, 1, OBJECTIVE):
        out = made.model(input_ids=torch.from_numpy(row.inputs).long()[None], output_router_logits=True)
        for layer, found in enumerate(out.router_logits):
            logits[layer].append(found.detach())
    joined = [torch.cat(layer) for layer in logits]
    expected = np.mean([float(load_balancing_loss_func((layer,), 4, 2)) for layer in joined])
    z = np.mean([float(router_z_loss_func(layer[None])) for layer in joined])
    whole, metrics = gradients(made, batch)
    assert metrics["balance_loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["router_z_loss"] == pytest.approx(z, rel=1e-5)
    cut, other = gradients(pieces := Learner(run(family, budget=30, **settings)), batch)
    assert other["microbatches"] > 3 and other["balance_loss"] == pytest.approx(expected, rel=1e-5)
    tokens = sum(len(row.inputs) for row in trained_rows(batch, 1, OBJECTIVE))
    plain, without = gradients(Learner(run(family)), batch)
    assert other["loss"] - without["loss"] == pytest.approx(0.1 * expected + 0.01 * z, rel=1e-4)
    assert other["expert_load_max"] == without["expert_load_max"]
    assert all(int(c.sum()) == 2 * tokens for c in pieces.policy.load.tokens()), "the pass before is not counted"
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    router = next(name for name in whole if name.endswith("gate.weight"))
    assert float((whole[router] - plain[router]).norm()) > 1e-4


def test_it_balances():
    """A router that sends everything to two experts comes back when nothing else pulls: the loss falls towards top-k."""
    made = Learner(run_file(algorithm={"balance_coefficient": 1.0}, trainer={"learning_rate": 1e-2}))
    router = next(m for n, m in made.model.named_modules() if n.endswith("layers.0.mlp.gate"))
    with torch.no_grad():
        router.weight[:2] += 0.5  # pyright: ignore
    losses = [made.step(groups(seed=s, step=s), s + 1)["balance_loss"] for s in range(12)]
    assert losses[-1] < losses[0] and losses[-1] < 2.2


def test_families_without_such_a_loss_are_refused_by_name():
    """DeepSeek-V3 keeps its balance by a selection bias, which is frozen; a dense model has no routers."""
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no router_aux_loss_coef"):
        Learner(run("gpt2", balance_coefficient=0.01))
    model = tiny("deepseek_v3")
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM has no router_aux_loss_coef.*selection bias"):
        settings = run(balance_coefficient=0.01)
        Balance(model, settings.algorithm, ExpertLoad(model, Alone(settings)), Alone(settings))


def test_padding_is_nobody():
    """The part of a padded micro-batch is that of its rows alone; what padding holds changes nothing."""
    made = Learner(run(balance_coefficient=1.0))
    rows = trained_rows(groups(seed=2), 1, OBJECTIVE)
    [batch] = microbatches(rows, 10_000)
    noise = batch.inputs.copy()
    for i, length in enumerate(batch.lengths):  # pyright: ignore
        noise[i, length:] = 7
    found = []
    for each in (batch, dataclasses.replace(batch, inputs=noise)):
        made.policy.balance.begin([each], made.forward)
        made.policy.load.begin()
        with made.policy.load.counting(each), made.policy.balance.watching():
            made.forward(each)
        found.append(torch.as_tensor(made.policy.balance.part(each)).item())
    assert found[0] == found[1] > 0
