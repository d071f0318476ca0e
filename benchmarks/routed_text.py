"""Routes of a trained mixture of experts: a small Qwen3-MoE learns the text that lies in installed packages, and is asked.

    texts of four kinds (Python, C++ headers, prose of package descriptions, JSON and tables) ─► byte-pair tokens ─► AdamW with
    the family's balance loss ─► the experts of every (token, layer) of held-out pieces

Nothing is downloaded, so texts and figures vary a little with the packages that are installed. `Routed.kinds` tells which rows
are of a kind: a batch of one kind stands for RL on one task, a mixed one for several.

Axes: R rows, T tokens of a row, L layers, K experts per token, E experts of a layer.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from services.trainer.routes import RouteReplay

KINDS = {
    "python": ("torch/**/*.py", "transformers/models/**/*.py", "numpy/**/*.py"),
    "c++": ("torch/include/**/*.h", "torch/include/**/*.hpp", "numpy/**/*.h"),
    "prose": ("*.dist-info/METADATA", "*.dist-info/**/LICENSE*", "**/*.md", "**/*.rst"),
    "data": ("**/*.json", "**/*.csv", "**/*.yaml", "**/*.xml"),
}
KIND_BYTES, FILE_BYTES = 1_200_000, 40_000  # read of a kind, and at most of one file


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and its training."""

    experts: int = 32
    top_k: int = 4
    layers: int = 4
    hidden: int = 128
    vocabulary: int = 2048
    length: int = 128  # tokens of a row
    rows: int = 16  # of a training batch
    steps: int = 300


@dataclass(frozen=True, slots=True)
class Routed:
    """What was recorded."""

    routes: np.ndarray  # uint8 [R, T, L, K]
    kinds: np.ndarray  # int64 [R]: number of the row's kind
    losses: tuple[float, float]  # nats a token, of the first and the last steps
    seconds: float  # of training


def texts(folder: Path | None = None) -> dict[str, list[str]]:
    """Files of each kind, in an order that does not depend on the machine's clock or locale."""
    found = {}
    root = folder or Path(sysconfig.get_paths()["purelib"])
    for kind, patterns in KINDS.items():
        found[kind], size = [], 0
        for path in _interleaved(root, patterns):
            text = path.read_bytes()[:FILE_BYTES].decode("utf-8", "ignore")
            found[kind].append(text)
            size += len(text)
            if size > KIND_BYTES:
                break
    return found


def _interleaved(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Every 7th file first, then every 7th of the rest: neighbours in a folder are alike."""
    paths = sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})
    for start in range(7):
        yield from paths[start::7]


def tokens(given: dict[str, list[str]], sizes: Sizes) -> dict[str, np.ndarray]:
    """[pieces, length + 1] of each kind, with byte-pair codes learnt from all of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((text for kind in given.values() for text in kind), trainer)
    found = {}
    for kind, parts in given.items():
        ids = [i for text in tokenizer.encode_batch(parts) for i in text.ids]
        whole = len(ids) // (sizes.length + 1) * (sizes.length + 1)
        found[kind] = np.array(ids[:whole], np.int64).reshape(-1, sizes.length + 1)
    return found


def trained(pieces: dict[str, np.ndarray], sizes: Sizes) -> tuple[Any, tuple[float, float]]:
    """A model after `sizes.steps` steps on all kinds in equal parts, and its first and last losses."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden,
        moe_intermediate_size=sizes.hidden // 2, num_hidden_layers=sizes.layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=sizes.experts, num_experts_per_tok=sizes.top_k, norm_topk_prob=True,
        output_router_logits=True, router_aux_loss_coef=0.01, tie_word_embeddings=True, max_position_embeddings=sizes.length))
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    random, losses = np.random.default_rng(0), []
    for step in range(sizes.steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, (sizes.steps - step) / (0.3 * sizes.steps))
        rows = [part[random.integers(0, len(part) * 9 // 10)] for part in pieces.values() for _ in range(sizes.rows // 4)]
        ids = torch.from_numpy(np.stack(rows))
        found: Any = model(input_ids=ids[:, :-1])
        own = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), ids[:, 1:].flatten())
        (own + 0.01 * found.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(own.item())
    return model.eval(), (float(np.mean(losses[:5])), float(np.mean(losses[-20:])))


@torch.no_grad()
def recorded(sizes: Sizes, rows: int) -> Routed:
    """Train, then `rows` rows of held-out text, a quarter of each kind, as the sampler of R3 would record them."""
    start = time.perf_counter()
    pieces = tokens(texts(), sizes)
    with torch.enable_grad():
        model, losses = trained(pieces, sizes)
    took, replay = time.perf_counter() - start, RouteReplay(model)
    routes, kinds = [], []
    for number, part in enumerate(pieces.values()):
        held = part[len(part) * 9 // 10 :]
        for row in held[np.linspace(0, len(held) - 1, rows // 4).astype(int)]:
            with replay.recording() as layers:
                model(input_ids=torch.from_numpy(row[None, :-1]))
            routes.append(torch.stack(layers, 1).numpy().astype(np.uint8))
            kinds.append(number)
    return Routed(np.stack(routes), np.array(kinds), losses, took)
