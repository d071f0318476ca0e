"""Several optimizer steps on one batch: which rows each takes, and what its denominators count.

    batch k ─► advantages, of the whole batch ─► (a pass before anything changes: log p, routes)
            ─► epoch 1: mini-batches 1..m ─► epoch 2: split anew ─► ... each: forward, backward, clip, AdamW ─► version k

**Split.** Groups stay whole. The groups that count are ordered by a number drawn from (run seed, batch, epoch, group), and
dealt out in turn to `trainer.minibatches` parts, so their sizes differ by one group at most: a function of batch and seed, the
same after a restart and in a replay. Groups without signal are in no mini-batch; a batch that has fewer groups with one than
parts takes fewer mini-steps.

**Denominators** are of the mini-batch, by the same rule as those of a whole batch: all of its counted samples and tokens, those
whose advantage is 0 too, known before its first backward pass. With token_mean and parts of 300 and 500 tokens a token of the
first weighs 1 / 300, one of the second 1 / 500: Adam sees two means, not two parts of one.

**Advantages**, whitening, returns, a teacher's judgement and the reference's log-probabilities are of the whole batch and of
the weights before it. Lag counts batches: what the policy moves within one is what the trust region is for.

As in PPO (arXiv 1707.06347, algorithm 1: K epochs of minibatches), verl (ppo_mini_batch_size, ppo_epochs) and decoupled PPO
(arXiv 2505.24298), whose proximal policy is the one before the first mini-step.

Axes: M trained tokens of a row, S samples of a mini-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.trainer.algorithms.objective import Objective
from services.trainer.packing import Row
from slipstream import config, seeds

Weights = dict[int, float]  # sample of the batch -> what each of its tokens weighs in one mini-step


def plan(rows: Sequence[Row], objective: Objective, run: config.RunFile, batch: int) -> list[Weights]:
    """For each mini-step of batch number `batch`, in their order: its samples and their weights.

    `rows` are all that count (packing.trained_rows with `counted`). A part in which nothing moves is no mini-step.
    """
    found = []
    for epoch in range(run.trainer.epochs):
        for taken in _split(rows, run.trainer.minibatches, run.run.seed, batch, epoch):
            if any(objective.moves(row.advantages) for row in taken):
                found.append(_weights(taken, objective))
    return found


def part(rows: Sequence[Row], weights: Weights) -> list[Row]:
    """Those of `rows` that a mini-step takes, weighted."""
    return [replace(row, weight=weights[row.place[1]]) for row in rows if row.place[1] in weights]


def _split(rows: Sequence[Row], parts: int, seed: int, batch: int, epoch: int) -> list[list[Row]]:
    """Rows by mini-batch, each in the order of `rows`."""
    groups = sorted({row.place[0] for row in rows}, key=lambda group: seeds.stream(seed, "minibatches", batch, epoch, group))
    count = max(1, min(parts, len(groups)))
    part_of = {group: i % count for i, group in enumerate(groups)}
    found: list[list[Row]] = [[] for _ in range(count)]
    for row in rows:
        found[part_of[row.place[0]]].append(row)
    return found


def _weights(rows: Sequence[Row], objective: Objective) -> Weights:
    """Those of a mini-batch that is all there is."""
    tokens: dict[int, int] = {}
    for row in rows:
        tokens[row.place[1]] = tokens.get(row.place[1], 0) + len(row.index)
    weights_S = objective.weights(np.array(list(tokens.values()), np.int64))
    return dict(zip(tokens, weights_S.tolist(), strict=True))
