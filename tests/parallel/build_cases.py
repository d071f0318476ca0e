"""Models built on the ranks of a world, for comparison with one process; and how much memory that takes."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.trainer.parallel import mesh
from services.trainer.parallel.build import spread
from slipstream import config
from slipstream.model import build, files
from tests.parallel.families import COMMON, FAMILIES
from tests.trainer_samples import CHARS, run_file

TIED = "qwen3_moe, tied"
SHAPES = FAMILIES | {TIED: FAMILIES["qwen3_moe"] | {"tie_word_embeddings": True}}
# Many equal layers, so that none of them is a large part: 54 million parameters.
LARGE = dict(
    COMMON, hidden_size=256, num_hidden_layers=16, num_attention_heads=4, num_key_value_heads=4, head_dim=64, num_experts=8,
    moe_intermediate_size=512)


def run(shape: dict[str, Any], parallel: dict[str, Any], family: str = "qwen3_moe", **model: Any) -> config.RunFile:
    made = {"model_type": family, "tokenizer_chars": CHARS, "config": shape}
    return run_file(model={"build": None if "path" in model else made, **model}, trainer={"parallel": parallel})


def compared(name: str, parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    """On a rank: what differs from one process's model, and how far its answer to a sequence is away."""
    made = run(SHAPES[name], parallel, name.partition(",")[0], **model)
    device = mesh.join(made.trainer.parallel)
    seen = {}

    def prepare(model: Any, tokenizer: Any) -> Any:
        seen.update(files(model, tokenizer))
        return model

    found = spread(made, made.model, device, prepare)
    one, tokenizer = build(made.model, made.run.seed)
    one.eval()
    expected, own = tensors(one), tensors(found.model)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        own_logits, logits = (m(input_ids=ids, use_cache=False).logits for m in (found.model, one))
        gap = (mesh.whole(own_logits) - logits).abs().max()
    return {
        "names": expected.keys() ^ own.keys(), "differ": [n for n in expected if not torch.equal(expected[n], own[n])],
        "dtypes": [n for n in expected if expected[n].dtype != own[n].dtype], "gap": float(gap),
        "files": [n for n, data in files(one, tokenizer).items() if seen.get(n) != data], "training": found.model.training}


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Everything that it computes with, whole: parameters and buffers, also those that are not saved. Collective."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: mesh.whole(tensor.detach()) for name, tensor in named}


def world(jobs: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Several of `compared`, one after the other, on the same ranks."""
    return [compared(name, parallel, **model) for name, parallel, model in jobs]


def peaks(parallel: dict[str, Any], folder: str) -> dict[str, float]:
    """On a rank: the most memory that building took, from a seed and from a directory, in parts of the model's bytes."""
    found = {}
    compared(TIED, parallel)  # what the first model of a process loads is not the model's
    for kind, model in (("directory", {"path": folder}), ("seed", {})):
        made = run(LARGE, parallel, **model)
        device = mesh.join(made.trainer.parallel)
        built, peak = watched(lambda made=made, device=device: spread(made, made.model, device))
        size = sum(p.numel() * p.itemsize for p in built.model.parameters())
        found[kind] = peak / size
        own = sum(mesh.local(p).numel() * p.itemsize for p in built.model.parameters())
        found[f"{kind}, kept"] = own / size
        del built
    return found


def saved(folder: Path, name: str | None = None, dtype: str = "float32") -> str:
    """A Hugging Face directory of a family's tiny model, or of the large one."""
    made = run(LARGE if name is None else SHAPES[name], {}, (name or "qwen3_moe").partition(",")[0], dtype=dtype)
    model: Any
    model, tokenizer = build(made.model, 5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def watched(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and by how many bytes this process's own memory grew meanwhile, at most."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: what is freed goes back at once, and does not count
    libc.malloc_trim(0)
    start, most, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, resident() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = work()
    finally:
        done.set()
        thread.join()
    return result, max(most, resident() - start)


def resident() -> int:
    """Bytes that are this process's own: pages of files that are only mapped are not."""
    line = next(n for n in Path("/proc/self/status").read_text().splitlines() if n.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

