"""Route replay in tiny random models of every family of routers: the choice is the recording's, the weights are the router's.

Families are built in transformers and never named by the code under test. FAMILIES is the table of docs/guides/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from services.rollout.routes import RouteCapture
from services.trainer.routes import RouteReplay
from slipstream.errors import ConfigError, InvalidInput

ROWS, TOKENS, EXPERTS, TOP_K, GROUPS = 3, 11, 8, 2, 4
SHAPE = dict(
    vocab_size=67, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None)
ROUTED = dict(
    num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K,
    moe_intermediate_size=16)
GROUPED = dict(n_group=GROUPS, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=0)
LATENT = dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits [N, E], chosen indices [N, K] -> [N, K]


def softmax_of_all(normalised: bool, scale: float = 1.0) -> Formula:
    def weights(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        found = logits.softmax(-1).gather(1, chosen)
        return (found / found.sum(-1, keepdim=True) if normalised else found) * scale

    return weights


def softmax_of_chosen(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, chosen).softmax(-1)


def sigmoid(scale: float = 1.0) -> Formula:
    def weights(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        found = logits.sigmoid().gather(1, chosen)
        return found / found.sum(-1, keepdim=True) * scale

    return weights


# Family: what it needs beside SHAPE and ROUTED, and its weights by hand where the table of the guide names a kind of router.
FAMILIES: dict[str, tuple[dict[str, Any], Formula | None]] = {
    "qwen3_moe": ({"norm_topk_prob": True}, softmax_of_all(True)),
    "olmoe": ({}, softmax_of_all(False)),
    "mixtral": ({}, softmax_of_all(True)),
    "minimax": ({"layer_types": ["full_attention"] * 2}, softmax_of_all(True)),
    "gpt_oss": ({"layer_types": ["full_attention"] * 2}, softmax_of_chosen),
    "granitemoe": ({}, softmax_of_chosen),
    "minimax_m2": ({}, sigmoid()),
    "deepseek_v3": (GROUPED | LATENT, sigmoid(2.5)),
    "glm4_moe": (GROUPED, sigmoid(2.5)),
    "deepseek_v2": (GROUPED | LATENT | {"topk_method": "group_limited_greedy"}, softmax_of_all(False, 2.5)),
    "ernie4_5_moe": ({"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_layer_start_index": 0}, softmax_of_all(True)),
    "hunyuan_v1_moe": ({"moe_topk": TOP_K}, softmax_of_all(True)),
    "qwen3_next": (
        {"layer_types": ["full_attention"] * 2, "norm_topk_prob": True, "shared_expert_intermediate_size": 16},
        softmax_of_all(True)),
    "qwen2_moe": ({"shared_expert_intermediate_size": 16}, softmax_of_all(False)),
    "axk1": (GROUPED | LATENT, None),
    "bailing_hybrid": (GROUPED | LATENT, None),
    "cohere2_moe": ({}, None),
    "exaone_moe": (GROUPED, None),
    "flex_olmo": ({}, None),
    "glm4_moe_lite": (GROUPED | LATENT, None),
    "granitemoeshared": ({}, None),
    "hy_v3": ({}, None),
    "jamba": ({}, None),
    "laguna": ({}, None),
    "mellum": ({}, None),
    "solar_open": (GROUPED, None),
    "afmoe": ({}, None),
    "aria_text": ({"moe_num_experts": EXPERTS, "moe_topk": TOP_K}, None),
}


def tiny(family: str, **changes: Any) -> Any:
    """A random model whose routers have clear preferences, with a selection bias where the family has one."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SHAPE, **ROUTED, **FAMILIES.get(family, ({}, None))[0], **changes})
    kernel = {} if family == "llama" else {"experts_implementation": "grouped_mm"}
    model = AutoModelForCausalLM.from_config(config, **kernel).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.normal_(0, 0.3)
    return model


IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 67, (ROWS, TOKENS)))
EVERYWHERE = np.ones((ROWS, TOKENS), bool)


def own_routes(model: Any, ids: torch.Tensor = IDS) -> np.ndarray:
    """As the sampler captures them: [R, T, L, K]."""
    capture = RouteCapture(model)
    with capture, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    found = capture.take().numpy()
    return found.reshape(*ids.shape, *found.shape[1:])


def gradients(model: Any, routes: np.ndarray | None, replay: RouteReplay) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of a loss that no symmetry can hide, by name."""
    model.zero_grad()
    if routes is None:
        logits = model(input_ids=IDS, use_cache=False).logits
    else:
        with replay.using(routes, EVERYWHERE):
            logits = model(input_ids=IDS, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def another_choice(routes: np.ndarray) -> np.ndarray:
    """Every expert's neighbour in the next group: legal wherever the former choice was."""
    return ((routes + EXPERTS // GROUPS) % EXPERTS).astype(routes.dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_routes_change_nothing_and_others_are_taken(family):
    """The model's own routes, in any order within k, give the same bits in logits and gradients, and no flip; what the trainer
    records of its own pass (R2) is what the sampler captures. Others reach every expert call, all are counted, weights are
    those of the family's formula, and the router has a gradient."""
    model = tiny(family)
    own = own_routes(model)
    assert own.shape[-1] == TOP_K
    live = gradients(model, None, replay := RouteReplay(model))
    with torch.no_grad(), replay.recording() as layers:
        model(input_ids=IDS, use_cache=False)
    assert np.array_equal(torch.stack(layers, 1).reshape(own.shape).sort(-1).values.numpy(), np.sort(own, -1))
    for routes in (own, own[..., ::-1]):
        replayed = gradients(model, routes, replay)
        assert replay.flips() == (0, own.size // TOP_K)
        assert set(replayed) == set(live) and all(torch.equal(replayed[name], live[name]) for name in live)

    given: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    handles = [
        m.register_forward_pre_hook(lambda m, args: given.append((m, *args)))
        for m in model.modules() if hasattr(m, "_is_expert_parallel")]
    other = another_choice(own)
    found = gradients(model, other, replay)
    for handle in handles:
        handle.remove()
    assert not torch.equal(found["logits"], live["logits"])
    assert replay.flips()[0] > 0.8 * replay.flips()[1]
    routers = 0
    for layer, (experts, hidden, indices, weights) in enumerate(given):
        expected = torch.from_numpy(other[:, :, layer].reshape(-1, TOP_K).astype(np.int64))
        assert torch.equal(indices.sort(-1).values, expected.sort(-1).values)
        name = next(n for n, m in model.named_modules() if m is experts)
        block = model.get_submodule(name.rpartition(".")[0])
        [(place, router)] = [
            (n, p) for n, p in block.named_parameters() if p.shape == (EXPERTS, SHAPE["hidden_size"]) and "expert" not in n]
        gradient = found[f"{name.rpartition('.')[0]}.{place}"]
        assert torch.isfinite(gradient).all() and float(gradient.abs().max()) > 1e-6
        routers += 1
        if (formula := FAMILIES[family][1]) is not None:
            bias = dict(block.named_parameters()).get("router.bias")
            torch.testing.assert_close(weights, formula(F.linear(hidden, router, bias), indices), rtol=1e-4, atol=1e-6)
    assert routers == own.shape[2]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2"])
def test_routes_follow_their_tokens_through_padding(family):
    """A short row in a padded batch gets what it gets alone; what lies in the padding's routes does not matter; a row that came
    without routes routes itself, groups included."""
    model = tiny(family)
    replay, short = RouteReplay(model), 6
    routes = another_choice(own_routes(model))
    routed = EVERYWHERE.copy()
    routed[1, short:] = routed[2] = False
    padded = IDS.clone()
    padded[1, short:] = 0
    routes[1, short:] = 7  # an expert twice, were it looked at
    with torch.no_grad():
        with replay.using(routes, routed):
            together = model(input_ids=padded, use_cache=False).logits
        with replay.using(routes[1:2, :short], routed[1:2, :short]):
            alone = model(input_ids=IDS[1:2, :short], use_cache=False).logits
        live = model(input_ids=padded, use_cache=False).logits
    torch.testing.assert_close(together[1:2, :short], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together[2], live[2], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together[1, :short], live[1, :short], atol=1e-2)


def test_flips_are_token_and_layer_pairs():
    """Two changed tokens in the last layer, one of them only reordered: one flip."""
    model = tiny("mixtral")
    replay, routes = RouteReplay(model), own_routes(model)
    routes[0, 3, 1] = routes[0, 3, 1, ::-1]
    free = next(e for e in range(EXPERTS) if e not in routes[2, 5, 1])
    routes[2, 5, 1, 0] = free
    with torch.no_grad(), replay.using(routes, EVERYWHERE):
        model(input_ids=IDS, use_cache=False)
    assert replay.flips() == (1, ROWS * TOKENS * 2)


def test_live_choice_of_a_group_limited_router_is_compared_within_its_own_groups():
    """Groups are forced for the recorded experts' sake; the router's own choice, which flips are counted by, stays its own.
    Here one group of two experts is chosen, so a choice within a forced group would always be the recorded one."""
    model = tiny("deepseek_v2", topk_group=1)
    replay, routes = RouteReplay(model), own_routes(model)
    routes[1:, :, 1] = another_choice(routes[1:, :, 1])
    with torch.no_grad(), replay.using(routes, EVERYWHERE):
        model(input_ids=IDS, use_cache=False)
    assert replay.flips()[0] == (ROWS - 1) * TOKENS


def test_table_lookup_layers_need_no_replay():
    """DeepSeek-V4's hash layers choose by the token alone; its other layers are replayed."""
    model = tiny("deepseek_v4", **GROUPED, **LATENT, mlp_layer_types=["hash_moe", "moe"])
    with torch.no_grad():
        model.get_submodule("model.layers.0.mlp.gate").tid2eid.copy_(torch.arange(67)[:, None] + torch.arange(TOP_K) & 7)
    replay, own = RouteReplay(model), own_routes(model)
    with torch.no_grad():
        live = model(input_ids=IDS, use_cache=False).logits
        with replay.using(own, EVERYWHERE):
            assert torch.equal(model(input_ids=IDS, use_cache=False).logits, live)
        assert replay.flips() == (0, ROWS * TOKENS)
        with replay.using(another_choice(own), EVERYWHERE):
            model(input_ids=IDS, use_cache=False)
        assert replay.flips()[0] > 0


@pytest.mark.parametrize(("family", "why", "changes"), [
    ("phimoe", "by no topk", {}),
    ("llama", "no experts", {}),
    ("zaya", "among 9 for 8 experts", {"num_experts_per_tok": 1}),
])
def test_unknown_routers_are_refused_by_name(family, why, changes):
    """A choice without topk, no experts at all, an extra class that skips the experts: named, with a remedy."""
    model = tiny(family, **changes)
    with pytest.raises(ConfigError, match=f"{type(model).__name__}.*{why}.*route_replay = none"):
        RouteReplay(model)


def test_routes_that_cannot_be_of_this_model_are_refused():
    """Other layers, other k, an expert that does not exist, one expert twice."""
    model = tiny("qwen3_moe")
    replay, routes = RouteReplay(model), own_routes(model)
    for wrong, reason in ((routes[:, :, :1], "ROUTES_SHAPE"), (routes[..., :1], "ROUTES_SHAPE"), (routes + 7, "ROUTES_EXPERT")):
        with pytest.raises(InvalidInput) as caught, replay.using(wrong, EVERYWHERE):
            raise AssertionError("not reached")
        assert caught.value.reason == reason
    routes[0, 0, 0] = 3
    with torch.no_grad(), pytest.raises(InvalidInput, match="twice"), replay.using(routes, EVERYWHERE):
        model(input_ids=IDS, use_cache=False)
