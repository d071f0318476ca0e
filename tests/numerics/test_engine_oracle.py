"""The torch engine against its oracle, transformers itself: same greedy tokens, log-probabilities and routes, in any family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from slipstream.errors import InvalidInput
from tests.engine_models import FAMILIES, MOE, full_logprobs, prompts, tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family: str) -> None:
    """Greedy decoding of a ragged batch equals transformers' generate on each prompt alone."""
    model = tiny(family)
    decoder = Decoder(model, slots=8, context=48)
    asked = prompts(11)
    answers = decoder.decode([Request(p, 20, greedy=True) for p in asked])
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.from_numpy(prompt).long()[None]
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert answer.tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(answer.logprobs, full_logprobs(model, prompt, answer), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward(family: str, temperature: float) -> None:
    """Every sampled token's log-probability is the full forward's, of softmax(logits / T) in fp32, to 1e-5."""
    model = tiny(family)
    decoder = Decoder(model, slots=8, context=48)
    asked = [p for p in prompts(6) for _ in range(3)]
    answers = decoder.decode([Request(p, 16, seed=i, temperature=temperature) for i, p in enumerate(asked)])
    for prompt, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer.logprobs, full_logprobs(model, prompt, answer, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", MOE)
def test_routes_equal_a_full_forward(family: str) -> None:
    """The routes [T-1, L, K] are those of the full forward over all tokens but the last, for the prompt and the answer."""
    model = tiny(family)
    decoder = Decoder(model, slots=8, context=48, capture_routes=True)
    assert decoder.capture is not None
    asked = [p for p in prompts(5) for _ in range(3)]
    answers = decoder.decode([Request(p, 12, seed=i, routes=True) for i, p in enumerate(asked)])
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, answer.tokens])).long()[None, :-1]
        with torch.inference_mode(), decoder.capture:
            model(input_ids=tokens, use_cache=False)
        expected = decoder.capture.take().numpy()
        assert answer.routes is not None
        assert answer.routes.shape == expected.shape == (tokens.shape[1], decoder.capture.layers, 2)
        assert np.array_equal(np.sort(answer.routes, -1), np.sort(expected, -1))


def test_families_with_other_state_are_refused_by_name() -> None:
    """A model that keeps more than keys and values is refused at start, naming family and layer type."""
    config = CONFIG_MAPPING["qwen3_next"](
        vocab_size=67, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16)
    with pytest.raises(InvalidInput, match=r"qwen3_next.*linear_attention"):
        Decoder(AutoModelForCausalLM.from_config(config), slots=8, context=32)
