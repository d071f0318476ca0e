"""Low-rank adapters: what an engine merges, what the trainer adds and what PEFT says are the same function."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from slipstream.adapters import PREFIX, Adapter, Merged, attach, attach_sent, merged_copy
from slipstream.config_sections import Lora
from slipstream.errors import ConfigError, InvalidInput
from tests.engine_models import MOE, tiny

pytestmark = pytest.mark.slow

SETTINGS = Lora(rank=4, alpha=8)
SCALE = 2.0
IDS = torch.randint(1, 67, (3, 11), generator=torch.Generator().manual_seed(5))


def trained(model: Any, settings: Lora = SETTINGS, seed: int = 1) -> Adapter:
    """An adapter that says something: B is random, too."""
    adapter = attach(model, settings, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapter


def logprobs(model: Any) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits, -1)


def by_hand(model: Any, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + s B A of every adapted weight, by name: from the names and the formula, with nothing of PEFT's."""
    found = {}
    for name, a in adapter.items():
        if not name.endswith("lora_A.weight"):
            continue
        b, place = adapter[name.replace("lora_A", "lora_B")], name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if "experts" not in place:
            found[place + ".weight"] = model.get_parameter(place + ".weight") + SCALE * b @ a
            continue
        # PEFT wraps one parameter after the other, the first in the order of their names is the innermost.
        experts = model.get_submodule(place.removesuffix(".base_layer"))
        which = "gate_up_proj" if place.endswith(".base_layer") else "down_proj"
        weight, count = getattr(experts, which), experts.num_experts
        a_E_r_I, b_O_r_E = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count)
        sum_of = "ore,eri->eio" if experts.is_transposed else "ore,eri->eoi"
        found[f"{place.removesuffix('.base_layer')}.{which}"] = weight + SCALE * torch.einsum(sum_of, b_O_r_E, a_E_r_I)
    return found


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm", "eager", "dense"])
@pytest.mark.parametrize("family", MOE)
def test_merged_and_unmerged_agree(family, kernel):
    """Every MoE family and expert kernel: 1e-5 in fp32, 1e-6 in fp64 (norms and routers stay fp32 inside); off is the base.

    grouped_mm has no kernel for fp64.
    """
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-6))[: 1 if kernel == "grouped_mm" else 2]:
        model = tiny(family, kernel).to(dtype)
        before = logprobs(model)
        adapter = trained(model)
        beside = logprobs(model)
        with adapter.off():
            assert torch.equal(logprobs(model), before)
        Merged(adapter).apply()
        assert (logprobs(model) - beside).abs().max() < tolerance
        assert (beside - before).abs().max() > 0.05, "the adapter does something"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_gradients_are_those_of_the_formula(family):
    """A and B of attention and experts get the gradients of W + s B A written by hand; the base gets none."""
    model = tiny(family)
    plain = copy.deepcopy(model)
    adapter = trained(model)
    loss = logprobs(model)[..., 3].sum()
    loss.backward()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in adapter.named_parameters()}
    output = functional_call(plain, by_hand(plain, leaves), (IDS,), {"use_cache": False})
    expected = torch.log_softmax(output.logits, -1)[..., 3].sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    for name, parameter in adapter.named_parameters():
        gradient, oracle = parameter.grad, leaves[name].grad
        assert gradient is not None and oracle is not None and oracle.abs().max() > 0, name
        assert (gradient - oracle).abs().max() <= 2e-5 * (1 + oracle.abs().max()), name
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_swaps_do_not_drift(family):
    """a, b, a, ... forty times and a again: the bits of a alone. What is added is added to the base, never to a sum."""
    model, other = tiny(family), tiny(family)
    first, second = trained(tiny(family), seed=1), trained(tiny(family), seed=2)
    merged, once = Merged(attach_sent(model, first.files())), Merged(attach_sent(other, first.files()))
    for _ in range(40):
        merged.load(first.tensors())
        merged.load(second.tensors())
    merged.load(first.tensors())
    once.load(first.tensors())
    state = other.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        assert (logprobs(model) - logprobs(first.model)).abs().max() < 1e-5


def test_in_bfloat16_an_engine_computes_what_the_trainer_computes():
    """A first step of Adam is far below bfloat16's resolution of W: attention stays beside W, so it is not rounded away."""
    trainer = attach(tiny("qwen3_moe").to(torch.bfloat16), Lora(rank=4, alpha=8, targets=("attention",)), 1)
    assert {p.dtype for p in trainer.parameters()} == {torch.float32}
    with torch.no_grad():
        untrained = logprobs(trainer.model)
        for name, parameter in trainer.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-3)
    model = tiny("qwen3_moe").to(torch.bfloat16)
    engine = Merged(attach_sent(model, trainer.files()))
    engine.load(trainer.tensors())
    with torch.no_grad():
        assert torch.equal(logprobs(model), logprobs(trainer.model))
        assert not torch.equal(logprobs(model), untrained)
    both = trained(tiny("qwen3_moe").to(torch.bfloat16))
    model = tiny("qwen3_moe").to(torch.bfloat16)
    Merged(attach_sent(model, both.files())).load(both.tensors())
    with torch.no_grad():
        assert torch.equal(logprobs(model), logprobs(both.model)), "experts are added by the operation of the trainer's pass"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_what_is_saved_is_ordinary(family, tmp_path):
    """peft.PeftModel.from_pretrained takes the adapter, transformers alone takes the merged model: both say the same."""
    model = tiny(family)
    plain = copy.deepcopy(model)
    adapter = trained(model)
    adapter.save_pretrained(tmp_path / "adapter")
    adapter.save_pretrained(tmp_path / "merged", merged=True)
    with torch.no_grad():
        expected = logprobs(model)
        loaded: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
        assert torch.equal(logprobs(loaded), expected)
        whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        assert (logprobs(whole) - expected).abs().max() < 1e-5
        assert torch.equal(logprobs(model), expected), "saving changed nothing"
    assert {n.split(".")[-1] for n in merged_copy(adapter)} == {n.split(".")[-1] for n in whole.state_dict()}


def test_targets_by_name():
    """Ends of names choose; an unknown one is answered with the nearest known."""
    names = [n for n, _ in attach(tiny("qwen3_moe"), Lora(targets=("q_proj", "down_proj")), 0).named_parameters()]
    assert {n.split(".")[-3] for n in names} == {"q_proj", "experts"} and len(names) == 2 * 2 * 2
    with pytest.raises(ConfigError, match=r"targets: Qwen3MoeForCausalLM has no layer 'q_prj'.*did you mean 'q_proj'"):
        attach(tiny("qwen3_moe"), Lora(targets=("q_prj",)), 0)
    with pytest.raises(ConfigError, match="no layer 'experts'"):
        attach(tiny("llama"), Lora(), 0)
    with pytest.raises(ConfigError, match="no layer 'lm_head'"):
        attach(tiny("llama"), Lora(targets=("lm_head",)), 0)


def test_an_adapter_of_another_shape_changes_nothing():
    """A missing tensor, or another rank, is refused before anything is written."""
    adapter = trained(tiny("qwen3_moe"))
    model = tiny("qwen3_moe")
    merged = Merged(attach_sent(model, adapter.files()))
    merged.load(adapter.tensors())
    with torch.no_grad():
        before = logprobs(model)
        for wrong in (adapter.tensors()[1:], trained(tiny("qwen3_moe"), Lora(rank=2, alpha=8)).tensors()):
            with pytest.raises(InvalidInput):
                merged.load(wrong)
        assert torch.equal(logprobs(model), before)
    with pytest.raises(InvalidInput, match="does not describe an adapter"):
        attach_sent(tiny("qwen3_moe"), {"adapter_config.json": b"{"})
