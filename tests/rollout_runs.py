"""A tiny run for tests of the rollout service: its run file, its model as tensors and files, its published versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream import config
from slipstream.manifest import RawTensor, write_version
from slipstream.model import build, files, state
from slipstream.objects import ObjectStore
from slipstream.protos.types.v1.policy_pb2 import PolicyVersion

CHARS = "0123456789=abcdefghij \n<>|user"
MODEL = {
    "build": {
        "model_type": "qwen3_moe", "tokenizer_chars": "".join(dict.fromkeys(CHARS)),
        "config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
            "norm_topk_prob": True, "max_position_embeddings": 128, "initializer_range": 0.1}},
}


def run_file(folder: Path, entry: str = "slipstream.environments.sort_digits:SortDigits", **sections: Any) -> config.RunFile:
    """A run on `entry`; each section's values override."""
    data: dict[str, Any] = {
        "run": {"name": "test", "folder": str(folder / "run"), "steps": 4},
        "model": MODEL,
        "environments": [{"name": "e", "entry": entry} | sections.pop("environment", {})],
        "schedule": {"groups_per_batch": 4, "group_size": 4},
        "rollout": {"slots": 16, "context": 64, "max_new_tokens": 8, "heartbeat_s": 0.05},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return config.parse(data)


def weights(run: config.RunFile, seed: int = 0) -> tuple[dict[str, bytes], list[RawTensor]]:
    """(files, tensors) of a model made from `seed`."""
    model, tokenizer = build(run.model, seed, run.deterministic)
    return files(model, tokenizer), state(model)


async def publish(store: ObjectStore, run: config.RunFile, number: int, step: int, seed: int = 0) -> PolicyVersion:
    """Write a version whose weights come from `seed`."""
    sent, tensors = weights(run, seed)
    return await write_version(store, run=run.run.name, number=number, step=step, incarnation=1, tensors=tensors, files=sent)
