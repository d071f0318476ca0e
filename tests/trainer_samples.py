"""Synthetic batches and run files for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.trainer.algorithms.objective import Objective
from services.trainer.packing import Group, Member
from slipstream.config import RunFile, parse
from slipstream.sample import Sample, Segment, Span

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(SHAPE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "mixtral": dict(SHAPE, num_local_experts=4, num_experts_per_tok=2, intermediate_size=32),
    "olmoe": dict(SHAPE, num_experts=4, num_experts_per_tok=2, intermediate_size=32),
}
# Computes in double precision throughout when asked to; the others round norms and router to fp32 on the way.
EXACT = {"gpt2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)}
CHARS = "0123456789="


def run_file(folder: str = "", family: str = "qwen3_moe", **sections: dict[str, Any]) -> RunFile:
    """A tiny run; `sections` override, such as trainer={"learning_rate": 1e-2}."""
    data: dict[str, Any] = {
        "run": {"name": "test", "folder": str(folder), "steps": 4},
        "model": {"build": {"model_type": family, "tokenizer_chars": CHARS, "config": (FAMILIES | EXACT)[family]}},
        "environments": [{"name": "sort", "entry": "slipstream.environments.sort_digits:SortDigits"}],
        "schedule": {"groups_per_batch": 4, "group_size": 4, "max_lag": 2},
        "algorithm": {"preset": "grpo"},
        "trainer": {"learning_rate": 1e-3, "checkpoint_every": 2},
    }
    for name, values in sections.items():
        data[name] = {**data.get(name, {}), **values}
    return parse(data)


OBJECTIVE = Objective(run_file().algorithm, longest=64)


def segment(prompt: Sequence[int], answer: Sequence[int], logprobs: Sequence[float] | None = None, step: int = 0) -> Segment:
    """A prompt and an answer that one version sampled."""
    tokens = np.array([*prompt, *answer], np.int32)
    given = np.full(len(answer), -2.4, np.float32) if logprobs is None else np.array(logprobs, np.float32)
    return Segment(tokens, np.arange(len(tokens)) >= len(prompt), given, (Span(step + 1, step, 1, len(answer)),))


def groups(count: int = 4, size: int = 4, seed: int = 0, rewards: Sequence[float] = (0, 1, 0, 1), step: int = 0) -> list[Group]:
    """Random prompts and answers; sample i of every group has rewards[i % len(rewards)]."""
    random = np.random.default_rng(seed)
    found = []
    for draw in range(count):
        prompt = [*random.integers(2, 12, random.integers(2, 6)), 12]
        members = []
        for i in range(size):
            answer = [*random.integers(2, 12, random.integers(1, 8)), 1]
            logprobs = -random.uniform(1, 4, len(answer))
            members.append(Member(i, Sample([segment(prompt, answer, logprobs, step)]), float(rewards[i % len(rewards)])))
        found.append(Group(draw, members))
    return found
