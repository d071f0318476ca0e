"""What must be float32 in a bfloat16 model, in every family of routers: router products, scores, choice, log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from services.trainer.logprobs import chunked, output_head
from services.trainer.routes import RouteReplay
from slipstream.model import build, files, load_state, skeleton, state
from slipstream.router_precision import compute_in_float32, router_modules
from tests.numerics.test_routes import EVERYWHERE, FAMILIES, IDS, own_routes, tiny
from tests.trainer_samples import run_file

pytestmark = pytest.mark.slow

WATCHED = ("linear", "matmul", "softmax", "sigmoid", "topk")
# Families whose own code has bfloat16 products, softmax or choice: the table of docs/guides/algorithms.md.
HALF_PRODUCTS = {
    "qwen3_moe", "olmoe", "mixtral", "minimax", "gpt_oss", "granitemoe", "minimax_m2", "hunyuan_v1_moe", "qwen3_next",
    "qwen2_moe", "cohere2_moe", "flex_olmo", "granitemoeshared", "jamba", "laguna", "mellum", "afmoe", "aria_text"}
HALF_CHOICE = {"gpt_oss", "cohere2_moe", "aria_text"}


class Watch(TorchFunctionMode):
    """Types of what is computed inside of routers, by function."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside, self.types = 0, {name: set() for name in WATCHED}
        for router, _ in router_modules(model):
            router.register_forward_pre_hook(lambda *_: self.step(1))
            router.register_forward_hook(lambda *_: self.step(-1))

    def step(self, by: int) -> None:
        self.inside += by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.inside and name in self.types:
            self.types[name].add((found[0] if isinstance(found, tuple) else found).dtype)
        return found


def watched(model: Any) -> dict[str, set[torch.dtype]]:
    with Watch(model) as watch:
        model(input_ids=IDS, use_cache=False)
    return watch.types


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_compute_in_float32(family):
    """After compute_in_float32 nothing in a router is 16-bit: products, scores, choice. Before, it is in the families of the
    table, and only there. The model stays bfloat16; backward reaches the router; replay finds its seam."""
    model = tiny(family).bfloat16()
    before = watched(model)
    half = {name for name, types in before.items() if torch.bfloat16 in types}
    assert bool(half & {"linear", "matmul"}) == (family in HALF_PRODUCTS) and ("topk" in half) == (family in HALF_CHOICE)
    assert compute_in_float32(model) == len(router_modules(model)) > 0
    after = watched(model)
    assert after["topk"] == {torch.float32} and after["linear"] | after["matmul"] == {torch.float32}
    assert not any(torch.bfloat16 in types for types in after.values())
    replay, routes = RouteReplay(model), own_routes(model)
    with replay.using(routes, EVERYWHERE):
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.dtype == torch.bfloat16 and replay.flips()[0] == 0
    logits.float().square().sum().backward()
    gradients = [p.grad for router, _ in router_modules(model) for p in router.parameters() if p.requires_grad]
    assert any(g is not None and float(g.abs().sum()) > 0 for g in gradients)


def test_trainer_and_sampler_build_such_models():
    """Both ways to a model of a run: from the run file, and from a version's files."""
    run = run_file(model={"dtype": "bfloat16"})
    built, tokenizer = build(run.model, 0)
    sent, _ = skeleton(files(built, tokenizer), "bfloat16")
    load_state(sent, state(built))
    for model in (built, sent):
        with Watch(model) as watch, torch.no_grad():
            model(input_ids=IDS % 12, use_cache=False)
        assert watch.types["linear"] == watch.types["topk"] == {torch.float32}


def test_float32_and_dense_models_have_no_hooks():
    """Nothing to do, nothing done: no cost where there is no use."""
    assert compute_in_float32(tiny("qwen3_moe")) == 0 and compute_in_float32(tiny("llama").bfloat16()) == 0


def test_the_logits_are_those_of_a_float32_router():
    """To the bit the product of the same hidden states and weights in float32, which bfloat16 rounds away."""
    model = tiny("qwen3_moe").bfloat16()
    compute_in_float32(model)
    [(router, index), _] = router_modules(model)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    router.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output[index])))
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    [(hidden, logits)] = seen
    expected = hidden.reshape(-1, hidden.shape[-1]).float() @ router.weight.float().T  # pyright: ignore
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert float((logits - logits.bfloat16().float()).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_float32(family):
    """From bfloat16 hidden states through the family's own head: the log-softmax of transformers' logits, taken in float32."""
    model = tiny(family).bfloat16()
    hidden: list[torch.Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
        handle.remove()
        targets = IDS.reshape(-1)
        found, entropy = chunked(hidden[0].reshape(len(targets), -1), output_head(model), targets, 7)
    assert found.dtype == entropy.dtype == torch.float32
    expected = logits.float().log_softmax(-1).reshape(len(targets), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
