"""Sequences shared by the ranks of a world: attention alone, in double precision, and whole steps of the learner."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from services.trainer.parallel import context_attention
from services.trainer.parallel.context import Context
from services.trainer.parallel.learner import ShardedLearner
from slipstream import config
from slipstream.errors import ConfigError
from slipstream.model import build
from tests.parallel.families import DEEPSEEK, FAMILIES
from tests.parallel.learner_cases import ROWS, trained
from tests.trainer_samples import CHARS, run_file

ROW, TOKENS, SIZE = 2, 12, 8  # rows, tokens of a row, head size
# (heads of queries, heads of keys and values, mask): heads divide by 2 and 4.
ATTENTION = [(4, 4, "causal"), (8, 4, "causal"), (4, 2, "packed"), (8, 1, "sliding"), (12, 3, "causal"), (12, 6, "packed")]


def heads(count: int) -> dict[str, int]:
    """Attention heads of a tiny model: half as many of keys and values."""
    return {"num_attention_heads": count, "num_key_value_heads": count // 2}


LATENT = dict(DEEPSEEK, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
SHAPES: dict[str, dict[str, Any]] = {
    name: shape | heads(4) for name, shape in FAMILIES.items() if name != "deepseek_v3"
} | {"deepseek_v3": LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4}}
SHAPES["gpt_oss"] = SHAPES["gpt_oss"] | {"sliding_window": 4}
SHAPES["qwen3_next"] = SHAPES["qwen3_next"] | {"layer_types": ["full_attention", "linear_attention"]}
SHAPES["mixtral"] = SHAPES["mixtral"] | {"sliding_window": 5, "num_key_value_heads": 1}


def mask(kind: str) -> torch.Tensor:
    """bool [T, T], True where a query may look: causal, within a window of 5, or within segments of 5 and 7."""
    at = torch.arange(TOKENS)
    back = at[:, None] - at[None]
    near = {"causal": back >= 0, "sliding": back < 5, "packed": (at[:, None] < 5) == (at[None] < 5)}[kind]
    return near & (back >= 0)


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """torch's own attention: [R, H, T, D] -> [R, T, H, D]."""
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, enable_gqa=query.shape[1] != key.shape[1], scale=0.3)
    return found.transpose(1, 2)


def attention() -> list[list[float]]:
    """On a rank: for each case the largest differences from one process, of the output and of three gradients."""
    group = dist.group.WORLD
    assert group is not None
    own, found = TOKENS // group.size(), []
    piece = slice(group.rank() * own, (group.rank() + 1) * own)
    for queries, keys, kind in ATTENTION:
        random = torch.Generator().manual_seed(queries + keys)
        whole = [
            torch.randn(ROW, n, TOKENS, size, dtype=torch.float64, generator=random).requires_grad_()
            for n, size in ((queries, SIZE), (keys, SIZE), (keys, SIZE + 2))]
        weight = torch.randn(ROW, TOKENS, queries, SIZE + 2, dtype=torch.float64, generator=random)
        expected = plain(whole[0], whole[1], whole[2], mask(kind))
        (expected * weight).sum().backward()
        mine = [w.detach()[:, :, piece].clone().requires_grad_() for w in whole]
        out = context_attention.ulysses(mine[0], mine[1], mine[2], group, lambda q, k, v, kind=kind: plain(q, k, v, mask(kind)))
        (out * weight[:, piece]).sum().backward()
        pairs = [(out, expected[:, piece]), *((m.grad, w.grad[:, :, piece]) for m, w in zip(mine, whole, strict=True))]  # pyright: ignore
        found.append([float((a - b).abs().max()) for a, b in pairs])  # pyright: ignore
    return found


def run(family: str, parallel: dict[str, Any], algorithm: dict[str, Any] | None = None) -> config.RunFile:
    """A tiny model of a family, with four attention heads."""
    shape = {"model_type": family, "tokenizer_chars": CHARS, "config": SHAPES[family]}
    return run_file(
        family="qwen3_moe", model={"build": shape}, trainer=ROWS | {"parallel": parallel}, algorithm=algorithm or {})


def steps(family: str, parallel: dict[str, Any], algorithm: dict[str, Any] | None = None) -> dict[str, Any]:
    """On a rank: see `learner_cases.trained`."""
    learner = ShardedLearner(run(family, parallel, algorithm))
    found = trained(learner)
    learner.close()
    return found


def world(jobs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Several runs of `steps`, one after the other, on the same ranks."""
    torch.manual_seed(0)
    return [steps(*job) for job in jobs]


def short() -> tuple[list[list[float]], list[dict[str, Any]]]:
    """What the quick test looks at, in one world of two."""
    return attention(), world([("qwen3_moe", dict(ranks=2, experts=2, context=2, exchange="flat"))])


def undivided() -> str:
    """On a rank: what `Context.verify` says of linear attention that sees a part of the sequence."""
    torch.manual_seed(0)
    settings = config.Parallel(ranks=dist.get_world_size(), context=dist.get_world_size())
    shape = {"model_type": "qwen3_next", "tokenizer_chars": CHARS, "config": FAMILIES["qwen3_next"]}
    built: Any = build(run_file(model={"build": shape}).model, 1)
    model, _ = built
    shared = Context(settings)
    model.set_attn_implementation(context_attention.PREFIX + "sdpa")  # `attach` would gather for the linear layers
    try:
        shared.verify(model.eval(), len(CHARS) + 2)
    except ConfigError as error:
        return error.message
    return ""
