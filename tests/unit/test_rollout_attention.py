"""The two products of a fast decode pass are attention: equal to torch's fused kernel, which still serves all other passes."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.rollout import attention
from services.rollout.decoder import Decoder
from slipstream import config, model

BUILD = config.Build(
    model_type="qwen3_moe", tokenizer_chars="01", config={
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8})


def layer(group: int) -> nn.Module:
    module = nn.Module()
    module.num_key_value_groups = group
    return module


def pass_of(queries: int, heads: int = 6, kinds: int = 3) -> tuple[torch.Tensor, ...]:
    """Query, key, value and mask; keys and values are slices of a longer cache, each row sees a prefix of its own."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(5, heads, queries, 8, generator=generator)
    key, value = (torch.randn(7, kinds, 32, 8, generator=generator)[:5, :, :24] for _ in range(2))
    seen = torch.arange(24) <= torch.arange(3, 23, 4)[:, None, None, None].expand(5, 1, queries, 1)
    return query, key, value, torch.where(seen, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kinds", [1, 2, 6])
def test_one_query_is_the_fused_kernel(kinds):
    inputs = pass_of(1, 6, kinds)
    mine, _ = attention.one_query(layer(6 // kinds), *inputs, scaling=0.3)
    fused, _ = sdpa_attention_forward(layer(6 // kinds), *inputs, scaling=0.3)
    assert mine.shape == fused.shape
    torch.testing.assert_close(mine, fused, rtol=0, atol=2e-6)


@pytest.mark.parametrize("queries, more", [(4, {}), (1, {"position_bias": torch.ones(5, 6, 1, 24)})])
def test_everything_else_goes_to_transformers(queries, more):
    inputs = pass_of(queries)
    mine, _ = attention.one_query(layer(2), *inputs, scaling=0.3, **more)
    fused, _ = sdpa_attention_forward(layer(2), *inputs, scaling=0.3, **more)
    assert torch.equal(mine, fused)


@pytest.mark.parametrize("deterministic, expected", [(False, attention.NAME), (True, "sdpa")])
def test_only_the_fast_decoder_uses_it(deterministic, expected):
    built, _ = model.build(config.Model(build=BUILD), 0, deterministic)
    Decoder(built, 4, 16, deterministic=deterministic)
    assert built.config._attn_implementation == expected
