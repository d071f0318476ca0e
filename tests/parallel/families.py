"""Tiny models of families of experts, and their training on the ranks of a world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import distributed as dist

from services.trainer.parallel.learner import ShardedLearner
from slipstream import config
from tests.trainer_samples import CHARS, groups, run_file

COMMON = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
    num_experts_per_tok=2)
DEEPSEEK = dict(
    COMMON, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=32, intermediate_size=32, first_k_dense_replace=1,
    n_group=2, topk_group=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(COMMON, head_dim=16, num_experts=4, moe_intermediate_size=32),
    "mixtral": dict(COMMON, num_local_experts=4, intermediate_size=32),
    "olmoe": dict(COMMON, num_experts=4, intermediate_size=32),
    "deepseek_v3": dict(
        DEEPSEEK, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16),
    "glm4_moe": dict(DEEPSEEK, head_dim=16),
    "gpt_oss": dict(COMMON, head_dim=16, num_local_experts=4, intermediate_size=32, sliding_window=16),
    "granitemoe": dict(COMMON, num_local_experts=4, intermediate_size=32),
    "minimax_m2": dict(COMMON, head_dim=16, num_local_experts=4, intermediate_size=32),
    "qwen2_moe": dict(
        COMMON, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, intermediate_size=32),
    "qwen3_next": dict(
        COMMON, head_dim=16, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
}


def run(family: str, ranks: int) -> config.RunFile:
    """On `ranks` ranks, with experts on all of them."""
    parallel = dict(ranks=ranks, experts=ranks, exchange="hierarchical", ranks_per_node=2) if ranks > 1 else {}
    build = {"model_type": family, "tokenizer_chars": CHARS, "config": FAMILIES[family]}
    return run_file(family="qwen3_moe", model={"build": build}, trainer={"learning_rate": 1e-3, "parallel": parallel})


def train(names: list[str], ranks: int, folder: str) -> dict[str, Any]:
    """On a rank: two steps of each, written as a Hugging Face directory. What rank 0 published, by family; or what failed."""
    found: dict[str, Any] = {}
    for name in names:
        learner = ShardedLearner(run(name, ranks))
        for step in (1, 2):
            learner.step(groups(5, seed=step), step)
        learner.save_pretrained(Path(folder) / name)
        found[name] = [(t.name, t.dtype, t.shape, bytes(t.data)) for t in learner.weights()], learner.files()
        learner.close()
    return found if dist.get_rank() == 0 else {}
