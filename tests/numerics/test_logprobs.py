"""Log-probabilities in chunks: equal to the plain computation, in value and gradient, and without its memory."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.logprobs import chunked, log_probabilities, output_head

SHAPE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=50)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 24, 25, 1000])
def test_chunks_equal_the_plain_computation(rows, entropy_gradient):
    """Values, and gradients in hidden states and weights, to 1e-12 in double precision for every cut."""
    torch.manual_seed(0)
    hidden = torch.randn(25, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (25,))

    def gradients(logprobs, entropy):
        total = (logprobs * torch.arange(25)).sum() + (entropy.sum() if entropy_gradient else 0)
        return torch.autograd.grad(total, (hidden, weight))

    plain = log_probabilities(hidden @ weight.T, targets, entropy_gradient)
    cut = chunked(hidden, lambda h: h @ weight.T, targets, rows, entropy_gradient)
    for ours, reference in zip((*cut, *gradients(*cut)), (*plain, *gradients(*plain)), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1e-12)


def test_no_full_matrix_of_logits_is_ever_held():
    """Counted by saved tensors: nothing of M x V outlives the forward pass, and no chunk is larger than asked for."""
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    kept, widest = [], 0

    def head(part: torch.Tensor) -> torch.Tensor:
        nonlocal widest
        widest = max(widest, len(part))
        return part @ weight.T

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked(hidden, head, torch.zeros(64, dtype=torch.long), 8)
    assert max(kept) < 64 * 1000 / 4
    assert widest == 8


@pytest.mark.parametrize(("family", "settings"), [
    ("qwen3_moe", dict(SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    ("granitemoe", dict(SHAPE, num_local_experts=4, num_experts_per_tok=2, intermediate_size=16, logits_scaling=3.0)),
    ("gemma2", dict(SHAPE, head_dim=8, intermediate_size=16, final_logit_softcapping=2.0)),
    ("cohere", dict(SHAPE, intermediate_size=16, logit_scale=0.25)),
])
def test_the_head_is_that_of_the_family(family, settings):
    """What a family does after its output embedding (scale, soft cap) is not lost: logits equal the model's own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).eval()
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = model(torch.arange(6)[None], use_cache=False).logits
    torch.testing.assert_close(output_head(model)(seen[0]), logits, rtol=0, atol=1e-6)
