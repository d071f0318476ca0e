"""What a model takes on a mesh, by formula: memory of each GPU, and whether it is proven, plausible or refused.

    python -m services.trainer.parallel.envelope --model qwen3-235b-a22b --length 32768 --ranks 64 --experts 64 [--gpu-gib 141]
    python -m services.trainer.parallel.envelope --table          the tables of docs/envelope.md

Axes: P parameters, H hidden, L layers, T tokens of a micro-batch, K experts per token, V vocabulary, R ranks, C ranks that
share a sequence (trainer.parallel.context), each with t = T / C tokens.

    state        (2 weight + 2 gradient + 12 master and moments) · P / R           bfloat16 with float32 masters
    gathered     2 · 2 · (P_dense / L + P_experts / L / experts)                   two layers in flight, weight and gradient
    activations  2 · t · (L · H + 2 A) with trainer.parallel.recompute, else 2 · t · L · A, where
                 A = 10 H + 4 Q + K · (2 H + 3 I) + shared · 3 I                    of a layer; with C > 1, which sends
                 and receives heads, 12 Q instead of 4 Q
    scores       2 · T² · heads / C · (4 with recompute, else 4 + L) for families that only have transformers' eager attention
                 (gpt-oss); the others' kernels keep no T²
    logits       (2 + 4 + 4) · t · V                                               logits, their softmax and its gradient
    exchange     DeepEP's buffer (deep_ep_checks.buffer_bytes), or the rows of one layer three times

Memory of the host with rank 0, in GiB of 2,048:

    host         14 · P · (ranks of the node) / R + 2 · P · copies        shards of a checkpoint that is being written, and the
                 version that is being published; two of them where versions are patches (trainer.full_every > 1)

Q is heads · head size, I the width of an expert. `reserve` is kept for the allocator, NCCL and the CUDA context. Proven is what
a test trains (tiny models on gloo ranks): no model of this table is. Plausible fits by these formulas and no constraint forbids
it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields

from services.trainer.parallel.deep_ep_checks import Demand, buffer_bytes, problems

GIB = 2**30
RESERVE_GIB = 10.0
HOST_GIB = 2048  # of an instance with eight such GPUs


@dataclass(frozen=True, slots=True)
class Model:
    """Of a published configuration. Counts in units, not in billions."""

    name: str
    family: str  # in transformers
    hidden: int
    layers: int
    dense_layers: int  # of them, those without experts
    heads: int
    head_size: int  # of what flash attention reads: queries
    experts: int
    top_k: int
    width: int  # of an expert
    shared: int  # experts that every token takes
    vocabulary: int
    total: float  # parameters
    note: str = ""
    eager: bool = False  # no fused attention in transformers: scores of T² are kept

    @property
    def expert_parameters(self) -> float:
        """Of all routed experts: three matrices each."""
        return 3.0 * self.hidden * self.width * self.experts * (self.layers - self.dense_layers)


MODELS = {m.name: m for m in (
    Model("qwen3-30b-a3b", "qwen3_moe", 2048, 48, 0, 32, 128, 128, 8, 768, 0, 151_936, 30.5e9),
    Model("qwen3-235b-a22b", "qwen3_moe", 4096, 94, 0, 64, 128, 128, 8, 1536, 0, 151_936, 235e9),
    Model("glm-4.5", "glm4_moe", 5120, 92, 3, 96, 128, 160, 8, 1536, 1, 151_552, 355e9),
    Model("deepseek-v3", "deepseek_v3", 7168, 61, 3, 128, 192, 256, 8, 2048, 1, 129_280, 671e9,
          "published in FP8: convert to bfloat16 first"),
    Model("kimi-k2", "deepseek_v3", 7168, 61, 1, 64, 192, 384, 8, 2048, 1, 163_840, 1040e9,
          "published in FP8: convert to bfloat16 first"),
    Model("gpt-oss-120b", "gpt_oss", 2880, 36, 0, 64, 64, 128, 4, 2880, 0, 201_088, 117e9,
          "published in MXFP4: convert to bfloat16 first; pad_hidden for DeepEP", eager=True),
)}


@dataclass(frozen=True, slots=True)
class Mesh:
    """What it is to run on."""

    ranks: int
    experts: int
    length: int  # of the longest sample: a micro-batch holds at least one
    gpu_gib: int = 141
    ranks_per_node: int = 8
    exchange: str = "deep_ep"
    recompute: bool = True
    context: int = 1

    @property
    def tokens(self) -> int:
        """Of the longest sample, on one rank."""
        return -(-self.length // self.context)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, in GiB."""

    state: float
    gathered: float
    activations: float
    scores: float
    logits: float
    exchange: float

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in PARTS) + RESERVE_GIB


PARTS = tuple(field.name for field in fields(Memory))


def demand(model: Model, mesh: Mesh) -> Demand:
    """What the exchange is asked for."""
    return Demand(
        model.experts, model.top_k, model.hidden, mesh.experts, mesh.ranks_per_node, max_tokens=min(8192, mesh.tokens),
        pad_hidden=bool(model.hidden % 256))


def memory(model: Model, mesh: Mesh) -> Memory:
    """By the formulas on top."""
    dense = model.total - model.expert_parameters
    tokens, layers = mesh.tokens, model.layers
    inner = 10 * model.hidden + (12 if mesh.context > 1 else 4) * model.heads * model.head_size + (
        model.top_k * (2 * model.hidden + 3 * model.width) + model.shared * 3 * model.width)
    per_token = layers * model.hidden + 2 * inner if mesh.recompute else layers * inner
    rows = 3 * 2 * tokens * model.hidden * min(model.top_k, mesh.experts)
    return Memory(
        16 * model.total / mesh.ranks / GIB,
        4 * (dense / layers + model.expert_parameters / (layers - model.dense_layers) / mesh.experts) / GIB,
        2 * tokens * per_token / GIB,
        2 * mesh.length**2 * model.heads / mesh.context * (4 if mesh.recompute else 4 + layers) / GIB if model.eager else 0.0,
        10 * tokens * model.vocabulary / GIB,
        (buffer_bytes(demand(model, mesh)) if mesh.exchange == "deep_ep" else rows) / GIB)


def host(model: Model, mesh: Mesh, copies: int = 2) -> float:
    """GiB of the host with rank 0. `copies`: 1 with trainer.full_every = 1."""
    return (14 * model.total * min(mesh.ranks_per_node, mesh.ranks) / mesh.ranks + 2 * model.total * copies) / GIB


def verdict(model: Model, mesh: Mesh) -> tuple[str, str]:
    """(plausible or refused, why)."""
    if mesh.ranks % mesh.experts or model.experts % mesh.experts:
        return "refused", f"{model.experts} experts over {mesh.experts} of {mesh.ranks} ranks do not divide"
    if mesh.ranks % mesh.context or model.heads % mesh.context:
        return "refused", f"context = {mesh.context} does not divide {mesh.ranks} ranks and {model.heads} heads"
    if mesh.exchange == "deep_ep" and (found := problems(demand(model, mesh))):
        return "refused", "; ".join(found)
    taken = memory(model, mesh)
    if taken.total > mesh.gpu_gib:
        return "refused", f"{taken.total:.0f} GiB of {mesh.gpu_gib}, {_largest(taken)}"
    if (least := host(model, mesh, 1)) > HOST_GIB:
        return "refused", (
            f"rank 0 gathers each version on its host: {least:.0f} GiB of {HOST_GIB} there, with trainer.full_every = 1")
    patched = "" if host(model, mesh) <= HOST_GIB else ", with trainer.full_every = 1"
    return "plausible", f"{taken.total:.0f} GiB of {mesh.gpu_gib}{patched}"


def fewest_ranks(model: Model, length: int, gpu_gib: int, most: int = 1024) -> Mesh | None:
    """The smallest mesh of whole nodes on which the memory of the GPUs suffices, experts as widely spread as they divide and
    sequences shared by as few ranks of a node as it takes.
    """
    ranks = 8
    while ranks <= most:
        for context in (1, 2, 4, 8):
            mesh = Mesh(ranks, _widest(model, ranks), length, gpu_gib, context=context)
            if memory(model, mesh).total <= gpu_gib and not model.heads % context and not problems(demand(model, mesh)):
                return mesh
        ranks *= 2
    return None


def _widest(model: Model, ranks: int) -> int:
    """Most ranks that its experts divide over."""
    return max(n for n in range(1, ranks + 1) if not ranks % n and not model.experts % n)


def _largest(taken: Memory) -> str:
    parts = {name: getattr(taken, name) for name in PARTS}
    name = max(parts, key=lambda n: parts[n])
    remedy = {"state": "more ranks", "gathered": "more expert ranks", "exchange": "a smaller max_tokens"}.get(
        name, "more context, recompute, or shorter samples")
    return f"most of it {name} ({parts[name]:.0f} GiB); {remedy}"


def table(gpu_gib: int = 141) -> str:
    """Markdown: for each model and length the smallest mesh, memory by part, and the verdict."""
    lines = [
        f"| model | length | ranks · experts · context | {' | '.join(PARTS)} | total GiB | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|---|"]
    for model in MODELS.values():
        for length in (4096, 16384, 65536):
            mesh = fewest_ranks(model, length, gpu_gib)
            if mesh is None:
                taken = memory(model, Mesh(1024, _widest(model, 1024), length, gpu_gib, context=8))
                lines.append(f"| {model.name} | {length} | none to 1024 |" + " |" * 7 + f" refused: {_largest(taken)} |")
                continue
            m, (word, why) = memory(model, mesh), verdict(model, mesh)
            figures = " | ".join(f"{v:.1f}" for v in (*(getattr(m, name) for name in PARTS), m.total))
            lines.append(f"| {model.name} | {length} | {mesh.ranks} · {mesh.experts} · {mesh.context} | {figures} | "
                         + (f"{word}: {why}" if word != "plausible" else word + ",".join(["", *why.split(",")[1:]])) + " |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """The command; its exit code: 1 when refused."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.parallel.envelope", description="Memory by formula.")
    parser.add_argument("--table", action="store_true", help="all models, as in docs/envelope.md")
    parser.add_argument("--model", choices=sorted(MODELS))
    parser.add_argument("--length", type=int, default=16384, help="tokens of the longest sample")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--context", type=int, default=1, help="trainer.parallel.context")
    parser.add_argument("--gpu-gib", type=int, default=141)
    parser.add_argument("--keep-activations", action="store_true", help="trainer.parallel.recompute = false")
    parser.add_argument("--exchange", choices=("deep_ep", "hierarchical", "flat"), default="deep_ep")
    given = parser.parse_args(arguments)
    if given.table or not given.model:
        print(table(given.gpu_gib))
        return 0
    model, mesh = MODELS[given.model], Mesh(
        given.ranks, given.experts, given.length, given.gpu_gib, exchange=given.exchange, recompute=not given.keep_activations,
        context=given.context)
    taken, (word, why) = memory(model, mesh), verdict(model, mesh)
    for name in PARTS:
        print(f"{name:12s}{getattr(taken, name):8.1f} GiB")
    print(f"{'host':12s}{host(model, mesh):8.1f} GiB of rank 0's machine, {host(model, mesh, 1):.1f} with full_every = 1")
    print(f"{'reserve':12s}{RESERVE_GIB:8.1f} GiB\n{word}: {why}" + (f"\nnote: {model.note}" if model.note else ""))
    return int(word == "refused")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
