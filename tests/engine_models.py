"""Tiny random models of many families for the engine's tests, and the full forward that is their oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from services.rollout.engine import Generation

SHAPE = dict(
    vocab_size=67, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, max_position_embeddings=128, initializer_range=0.1, pad_token_id=0, bos_token_id=None, eos_token_id=None)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(SHAPE, **EXPERTS, moe_intermediate_size=32, norm_topk_prob=True),
    "mixtral": dict(SHAPE, num_local_experts=8, num_experts_per_tok=2),
    "mixtral-window": dict(SHAPE, num_local_experts=8, num_experts_per_tok=2, sliding_window=6),
    "olmoe": dict(SHAPE, **EXPERTS, num_attention_heads=2),
    "llama": dict(SHAPE),
    "gemma3_text": dict(SHAPE, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(SHAPE, num_local_experts=8, num_experts_per_tok=2, sliding_window=6),
    "deepseek_v3": dict(
        {k: v for k, v in SHAPE.items() if k not in ("head_dim", "num_key_value_heads")}, num_key_value_heads=4,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=24),
}
MOE = [f for f in FAMILIES if f not in ("llama", "gemma3_text")]


def tiny(family: str, experts: str = "grouped_mm", seed: int = 0) -> Any:
    """A random model whose logits differ enough that greedy choices do not hang on the last bit."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family.split("-")[0]](**FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, **({"experts_implementation": experts} if family in MOE else {})).eval()


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, 67, size).astype(np.int32) for size in generator.integers(1, 14, count)]


@torch.inference_mode()
def full_logprobs(model: Any, prompt: np.ndarray, generation: Generation, temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of the generated tokens in one full forward, no cache."""
    tokens = torch.from_numpy(np.concatenate([prompt, generation.tokens])).long()[None]
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()
