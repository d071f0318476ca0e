"""Tokens per CPU-second of the torch engine on the demo's model, fast and deterministic, interleaved.

    python -m benchmarks.engine [--json FILE] [--repeats N]

The fast arms differ in `rollout.compile`, routes or slots; "fast" is as it comes.

512 requests, 64 prompts of 5 to 9 tokens in groups of 8, answers of 5 to 9 tokens, one thread, fp32. CPU time, not wall time:
other processes on the machine disturb it less. The median of the repeats counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import record
from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from slipstream import config
from slipstream.model import build

GROUPS, SIZE, CONTEXT = 64, 8, 32
ARMS: dict[str, dict[str, Any]] = {
    "fast": {"slots": 512, "compiled": "auto"},
    "fast_uncompiled": {"slots": 512, "compiled": "none"},
    "fast_compiled": {"slots": 512, "compiled": "all"},
    "fast_routes": {"slots": 512, "compiled": "auto", "capture_routes": True},
    "fast_256_slots": {"slots": 256, "compiled": "auto"},
    "deterministic": {"slots": 512, "deterministic": True},
}


def requests(seed: int) -> list[Request]:
    """One batch of the demo, with answers of fixed lengths."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(GROUPS):
        prompt = generator.integers(2, 14, generator.integers(5, 10)).astype(np.int32)
        made += [Request(prompt, int(generator.integers(5, 10)), seed=int(generator.integers(1 << 62))) for _ in range(SIZE)]
    return made


def tokens_per_s(decoder: Decoder, seed: int) -> float:
    asked = requests(seed)
    started = time.process_time()
    answers = decoder.decode(asked)
    return sum(len(a.tokens) for a in answers) / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per CPU-second of the torch engine.")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=9)
    found = parser.parse_args()
    torch.set_num_threads(1)
    run = config.load(Path(__file__).parents[1] / "examples" / "sort-digits" / "run.toml")
    decoders = {}
    for name, arm in ARMS.items():
        model, _ = build(run.model, 0, deterministic=arm.get("deterministic", False))
        decoders[name] = Decoder(model, context=CONTEXT, **arm)
        decoders[name].decode(requests(0))
    figures: dict[str, list[float]] = {name: [] for name in ARMS}
    for repeat in range(found.repeats):
        for name, decoder in decoders.items():
            figures[name].append(tokens_per_s(decoder, repeat))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    rows = [(name, f"{value:.0f}", f"{value / medians['fast']:.2f}") for name, value in medians.items()]
    record.publish(
        "torch engine, demo model, one thread", ("arm", "tokens per CPU-s", "of fast"), rows,
        {**{f"tokens_per_cpu_s_{name}": round(value) for name, value in medians.items()},
         "deterministic_over_fast": medians["deterministic"] / medians["fast"]}, found.json)


if __name__ == "__main__":
    main()
