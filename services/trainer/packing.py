"""From the groups of a batch to right-padded micro-batches: a pure function, so the same batch gives the same tensors.

Axes: R rows of a micro-batch, T input tokens of a row (padded), M trained tokens of a micro-batch, G samples of a group.

A segment is one row; group statistics count samples. A row's inputs are its tokens without the last, which predicts nothing.
Attention is causal and padding comes last, so no real token ever sees a padded one and no attention mask is needed. Only the
positions in `index_M` reach the loss.

Order, for whoever repeats it: rows in the order of group, sample, segment; longest first (stable); cut into micro-batches as
soon as rows x longest would exceed the budget (one row always fits).

Worked example: tokens 5 6 7 8 9 with loss mask 0 0 0 1 1 become inputs 5 6 7 8, index 2 3, targets 8 9.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.losses import grpo_advantages
from slipstream.errors import InvalidInput
from slipstream.sample import Sample, Segment

PAD_ID = 0  # any id would do
MIXED = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A finished sample of a group and its reward."""

    index: int
    sample: Sample
    reward: float


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one draw. Tokens sampled below `mask_below_step` are context only."""

    draw: int
    members: Sequence[Member]
    mask_below_step: int = 0
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment, ready to be padded. The last three are per trained token, [M]."""

    inputs: np.ndarray  # int32 [T]
    index: np.ndarray  # int64 [M]: position in `inputs` that predicts the token
    targets: np.ndarray  # int32 [M]
    behaviour: np.ndarray  # float32 [M]: log-probability under the sampler
    lags: np.ndarray  # int64 [M]: of the token, or MIXED where the segment's cache was filled by several versions
    advantage: float


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward and backward pass takes."""

    inputs: np.ndarray  # int64 [R, T]
    index: np.ndarray  # int64 [M]: row * T + position
    targets: np.ndarray  # int64 [M]
    behaviour: np.ndarray  # float32 [M]
    advantages: np.ndarray  # float32 [M]
    lags: np.ndarray  # int64 [M]


def trained_rows(groups: Sequence[Group], step: int, normalize_std: bool = True) -> list[Row]:
    """Rows of the samples that have a signal, of optimizer step `step`. Groups without one are left out altogether.

    Raises InvalidInput that names draw and sample when a segment is malformed.
    """
    rows = []
    for group in groups:
        members = sorted(group.members, key=lambda m: m.index)
        advantages_G = grpo_advantages(np.array([m.reward for m in members]), normalize_std)
        for member, advantage in zip(members, advantages_G.tolist(), strict=True):
            if advantage == 0.0:
                continue
            for i, segment in enumerate(member.sample.segments):
                place = f"draw {group.draw}, sample {member.index}, segment {i}"
                if row := _row(segment, step, group.mask_below_step, advantage, place):
                    rows.append(row)
    return rows


def microbatches(rows: Sequence[Row], tokens_per_microbatch: int) -> list[Microbatch]:
    """Rows, longest first, cut so that rows x longest stays within the budget."""
    ordered = sorted(rows, key=lambda row: -len(row.inputs))
    batches, start = [], 0
    while start < len(ordered):
        count = max(1, tokens_per_microbatch // len(ordered[start].inputs))
        batches.append(_pad(ordered[start : start + count]))
        start += count
    return batches


def without_signal(groups: Sequence[Group]) -> int:
    """Number of groups whose rewards are all equal."""
    return sum(len({m.reward for m in g.members}) < 2 for g in groups)


def lag_histogram(groups: Sequence[Group], step: int) -> Counter[int]:
    """Generated tokens of the whole batch by lag, (step - 1) - step of the version that sampled them."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for member in group.members:
            for segment in member.sample.segments:
                for span in segment.spans:
                    histogram[step - 1 - span.step] += span.length
    return histogram


def _row(segment: Segment, step: int, mask_below_step: int, advantage: float, place: str) -> Row | None:
    positions = np.flatnonzero(segment.loss_mask)
    if not len(positions):
        return None
    steps = np.repeat([span.step for span in segment.spans], [span.length for span in segment.spans])
    if not len(positions) == len(segment.logprobs) == len(steps):
        raise InvalidInput(
            f"{place}: {len(positions)} generated tokens, {len(segment.logprobs)} log-probabilities, {len(steps)} with a "
            "version; they must be equal", "LENGTH_MISMATCH", field="segments")
    if positions[0] == 0:
        raise InvalidInput(f"{place}: its first token is marked as generated, but nothing predicts it", "FIRST_TOKEN")
    if not np.isfinite(segment.logprobs).all():
        raise InvalidInput(f"{place}: a log-probability is NaN or infinite", "NON_FINITE_LOGPROB", field="logprobs")
    kept = steps >= mask_below_step
    if not kept.any():
        return None
    positions = positions[kept]
    versions = {(span.version, span.incarnation) for span in segment.spans}
    lags = step - 1 - steps[kept] if len(versions) == 1 else np.full(len(positions), MIXED)
    return Row(segment.tokens[:-1], positions - 1, segment.tokens[positions], segment.logprobs[kept], lags, advantage)


def _pad(rows: Sequence[Row]) -> Microbatch:
    width = len(rows[0].inputs)
    inputs = np.full((len(rows), width), PAD_ID, np.int64)
    for i, row in enumerate(rows):
        inputs[i, : len(row.inputs)] = row.inputs
    counts = [len(row.index) for row in rows]
    return Microbatch(
        inputs,
        np.concatenate([row.index for row in rows]) + np.repeat(np.arange(len(rows)) * width, counts),
        np.concatenate([row.targets for row in rows]).astype(np.int64),
        np.concatenate([row.behaviour for row in rows]).astype(np.float32),
        np.repeat(np.array([row.advantage for row in rows], np.float32), counts),
        np.concatenate([row.lags for row in rows]).astype(np.int64),
    )
