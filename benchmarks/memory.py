"""Peak memory of log-probabilities in chunks against the plain computation, forward and backward, each in a process of its own.

    python -m benchmarks.memory [--json FILE] [--tokens T] [--vocabulary V] [--rows N]

Plain holds [T, V] several times over (logits, their log-softmax, both gradients); in chunks of N rows it is [N, V], and what is
left are the weights' gradient [V, H] and the hidden states. Peak: the largest resident size of the process above what it had
before the first pass. The results of both, log-probabilities and gradients, are compared on the way.

The plain arm needs about 4 T V floats: 3.3 GB at the default size.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import record
from services.trainer.logprobs import chunked

HIDDEN = 64
ARMS = ("plain", "chunked")


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (largest so far) of this process, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measure(rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """One forward and backward pass; its peak, its CPU time, and sums by which its results are compared."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    hidden_M_H = torch.randn(tokens, HIDDEN, generator=random).requires_grad_()
    weight_V_H = (torch.randn(vocabulary, HIDDEN, generator=random) * 0.1).requires_grad_()
    targets_M = torch.randint(vocabulary, (tokens,), generator=random)
    before, started = resident("VmRSS"), time.process_time()
    logprobs_M, entropy_M = chunked(hidden_M_H, lambda hidden: hidden @ weight_V_H.T, targets_M, rows)
    logprobs_M.mean().backward()
    assert hidden_M_H.grad is not None and weight_V_H.grad is not None
    return {
        "peak": resident("VmHWM") - before, "cpu_s": time.process_time() - started,
        "logprob": logprobs_M.detach().double().mean().item(), "entropy": entropy_M.detach().double().mean().item(),
        "gradient_hidden": hidden_M_H.grad.double().norm().item(), "gradient_weight": weight_V_H.grad.double().norm().item()}


def apart(rows: int, tokens: int, vocabulary: int) -> dict[str, float]:
    """`measure` in a fresh process: a peak never falls, so each arm needs its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--arm", "--rows", str(rows), "--tokens", str(tokens),
         "--vocabulary", str(vocabulary)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of log-probabilities, in chunks and plain.")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--rows", type=int, default=256, help="trainer.logit_rows of the chunked arm")
    parser.add_argument("--arm", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        print(json.dumps(measure(asked.rows, asked.tokens, asked.vocabulary)))
        return
    found = {arm: apart(asked.tokens if arm == "plain" else asked.rows, asked.tokens, asked.vocabulary) for arm in ARMS}
    plain, pieces = found["plain"], found["chunked"]
    compared = ("logprob", "entropy", "gradient_hidden", "gradient_weight")
    difference = max(abs(plain[name] - pieces[name]) / abs(plain[name]) for name in compared)
    whole = asked.tokens * asked.vocabulary * 4
    record.publish(
        f"log-probabilities of {asked.tokens} tokens x {asked.vocabulary} words, forward and backward, fp32",
        ("arm", "peak MB", "of [T, V]", "CPU s"),
        [(arm, f"{found[arm]['peak'] / 1e6:.0f}", f"{found[arm]['peak'] / whole:.2f}", f"{found[arm]['cpu_s']:.1f}")
         for arm in ARMS],
        {"tokens": asked.tokens, "vocabulary": asked.vocabulary, "rows": asked.rows,
         "peak_mb_plain": plain["peak"] / 1e6, "peak_mb_chunked": pieces["peak"] / 1e6,
         "peak_chunked_over_plain": pieces["peak"] / plain["peak"], "cpu_chunked_over_plain": pieces["cpu_s"] / plain["cpu_s"],
         "largest_relative_difference": f"{difference:.1e}"}, asked.json)


if __name__ == "__main__":
    main()
