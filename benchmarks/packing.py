"""Packed rows against rows of one segment: how much of a micro-batch is padding, and trained tokens per second.

    python -m benchmarks.packing --json FILE [--rounds 8] [--budget 4096] [--longest 1024] [--only pareto|demo]

Learner.step of the demo's model on the same batches from the same weights, one thread. Two mixes: the demo's own batches, and
answers whose lengths have a long tail (8 · (1 + Pareto(1.1)), at most --longest), as reasoning models give them. Three arms
that take turns:

    rows    trainer.packing = rows, the default
    packed  trainer.packing = packed
    dense   the same packed rows as transformers handles them on a CPU: one mask of N x N for a row of N tokens

After the first step the losses are compared: the same work, else there is no figure. A ratio is of CPU seconds of one round,
the figure the median over rounds.

    padding_rows_MIX, padding_packed_MIX        share of the tokens of all micro-batches that is padding
    packed_over_rows_MIX                        trained tokens per second, packed / rows; above 1, packing is faster
    dense_over_rows_MIX                         the same of dense / rows
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.bare import Sampler
from benchmarks.record import publish
from benchmarks.trainer import demo
from services.trainer.learner import Learner
from services.trainer.packing import Group, Member, microbatches, trained_rows
from slipstream.errors import SlipstreamError
from slipstream.protos.types.v1 import policy_pb2
from slipstream.sample import FINISH_STOP, Sample, Segment, Span

BATCHES = 2  # of each mix
PROMPT, SHORTEST, TAIL = 32, 8, 1.1
ARMS = ("rows", "packed", "dense")
CLOSE = 1e-4  # of losses of the same step


def long_tail(longest: int, groups: int, size: int, seed: int) -> list[Group]:
    """Random tokens: a shape, not a task."""
    draws, found = np.random.default_rng(seed), []
    for draw in range(groups):
        prompt, members = draws.integers(2, 12, PROMPT), []
        for i in range(size):
            count = int(min(SHORTEST * (1 + draws.pareto(TAIL)), longest - PROMPT))
            tokens = np.concatenate([prompt, draws.integers(2, 12, count)]).astype(np.int32)
            logprobs = -draws.uniform(1, 4, count).astype(np.float32)
            segment = Segment(tokens, np.arange(len(tokens)) >= PROMPT, logprobs, (Span(1, 0, 1, count),))
            members.append(Member(i, Sample([segment], FINISH_STOP), float(i % 2)))
        found.append(Group(draw, members))
    return found


def learner(arm: str, budget: int, longest: int) -> Learner:
    """Of an arm, from the demo's seed."""
    made = Learner(demo(
        0, f"trainer.tokens_per_microbatch={budget}", f"trainer.packing={'rows' if arm == 'rows' else 'packed'}",
        f"rollout.context={longest}", f"rollout.max_new_tokens={longest - PROMPT}",
        f"model.build.config.max_position_embeddings={longest}", "trainer.learning_rate=1e-9"))
    if arm == "dense":
        made.model.set_attn_implementation("sdpa")
    return made


def padding(made: Learner, batches: list[list[Group]]) -> float:
    """Share of the tokens of all micro-batches that is padding."""
    trainer, held, real = made.run.trainer, 0, 0
    for groups in batches:
        rows = trained_rows(groups, 1, made.objective)
        real += sum(len(row.inputs) for row in rows)
        held += sum(b.inputs.size for b in microbatches(rows, trainer.tokens_per_microbatch, trainer.packing == "packed"))
    return 1 - real / held


def measured(mix: str, batches: list[list[Group]], rounds: int, budget: int, longest: int) -> tuple[dict[str, Any], list[str]]:
    """Figures of a mix, and its line of the table. Raises SlipstreamError when the arms do not do the same work."""
    made = {arm: learner(arm, budget, longest) for arm in ARMS}
    losses = {arm: made[arm].step(batches[0], 1)["loss"] for arm in ARMS}
    if max(losses.values()) - min(losses.values()) > CLOSE:
        raise SlipstreamError(f"after one step the losses are {losses}: not the same work")
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    tokens = 0
    for number in range(rounds):
        for arm in ARMS[number % 3:] + ARMS[:number % 3]:
            began = time.process_time()
            tokens = sum(made[arm].step(groups, 2)["trained_tokens"] for groups in batches)
            found[arm].append(time.process_time() - began)
    shares = {arm: padding(made[arm], batches) for arm in ARMS[:2]}
    ratios = {arm: [a / b for a, b in zip(found["rows"], found[arm], strict=True)] for arm in ARMS[1:]}
    figures = {f"padding_{arm}_{mix}": share for arm, share in shares.items()}
    figures |= {f"{arm}_over_rows_{mix}": statistics.median(values) for arm, values in ratios.items()}
    line = [mix, *(f"{shares[arm]:.1%}" for arm in ARMS[:2])]
    line += [f"{tokens / statistics.median(found[arm]):.0f}" for arm in ARMS]
    line += [f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in ratios.values()]
    return figures, line


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--only", choices=["pareto", "demo"])
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mixes: dict[str, list[list[Group]]] = {}
    if arguments.only != "demo":
        mixes["pareto"] = [long_tail(arguments.longest, 16, 8, seed) for seed in range(BATCHES)]
    if arguments.only != "pareto":
        source, sampler = Learner(demo(0)), Sampler(demo(0))
        sampler.decoder.load(source.weights(), policy_pb2.PolicyVersion(number=1, step=0))
        mixes["demo"] = [[Group(g.draw, [Member(m.index, m.sample, float(m.index % 2)) for m in g.members])
                          for g in sampler.batch(k)] for k in range(1, BATCHES + 1)]
    figures: dict[str, Any] = {"budget": arguments.budget, "longest": arguments.longest}
    rows = []
    for mix, batches in mixes.items():
        part, line = measured(mix, batches, arguments.rounds, arguments.budget, arguments.longest)
        figures |= part
        rows.append(line)
        print(*line, flush=True)
    publish("packed rows against rows of one segment", [
        "mix", "padding, rows", "padding, packed", *(f"{arm}, tokens/s" for arm in ARMS), "packed / rows", "dense / rows"],
        rows, figures, arguments.json)


if __name__ == "__main__":
    main()
