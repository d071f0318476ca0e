"""Tiny models on disk for whole runs."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from slipstream.model import character_tokenizer

SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 32, "num_experts": 8, "moe_intermediate_size": 64}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4}),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4}),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """family → a directory as `save_pretrained` writes it, with a character tokenizer."""

    def make(family: str = "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        tokenizer = character_tokenizer("0123456789=")
        config_class, model_class, extra = FAMILIES[family]
        torch.manual_seed(0)
        model = model_class(
            config_class(
                **SHAPE,
                **extra,
                vocab_size=len(tokenizer),
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )
        )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make
