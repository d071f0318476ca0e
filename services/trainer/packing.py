"""From the groups of a batch to micro-batches: a pure function, so the same batch gives the same tensors.

Axes: R rows of a micro-batch, T input tokens of a row (padded), S segments of a micro-batch, M its trained tokens, G samples of
a group.

A segment is one `Row`; group statistics count samples. Its inputs are its tokens without the last, which predicts nothing. Only
the positions in `index_M` reach the loss. A micro-batch holds segments in one of two ways (trainer.packing):

    rows    a row for each, right-padded to the longest. Attention is causal and padding comes last, so no real token ever sees
            a padded one and no attention mask is needed
    packed  one row, segments one after the other, no padding; positions restart, and attention keeps to each segment
            (services/trainer/packed_attention.py)

Order, for whoever repeats it: rows in the order of group, sample, segment; longest first (stable); cut into micro-batches as
soon as rows x longest would exceed the budget (one row always fits). Packed: see `best_fit`.

Worked example: tokens 5 6 7 8 9 with loss mask 0 0 0 1 1 become inputs 5 6 7 8, index 2 3, targets 8 9.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.trainer.algorithms.advantages import nothing_to_compare
from services.trainer.algorithms.objective import Episode, Objective, group_numbers
from slipstream.errors import InvalidInput
from slipstream.sample import FINISH_LENGTH, Sample, Segment, turn_numbers

PAD_ID = 0  # any id would do


def _nothing() -> np.ndarray:
    return np.zeros(0)


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(slots=True)  # one a sample: frozen, it would take three times as long to make
class Member:
    """A finished sample of a group and its reward. `rewards`, when there are some, say which tokens it is for."""

    index: int
    sample: Sample
    reward: float
    rewards: np.ndarray | None = None  # float64, of each generated token, segment by segment; None: all on the last


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one draw. Tokens sampled below `mask_below_step` are context only."""

    draw: int
    members: Sequence[Member]
    mask_below_step: int = 0
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One segment, ready to be laid into a micro-batch. Arrays after `index` are per trained token, [M]."""

    inputs: np.ndarray  # int32 [T]
    index: np.ndarray  # int64 [M]: position in `inputs` that predicts the token
    targets: np.ndarray  # int32 [M]
    behaviour: np.ndarray  # float32 [M]: log-probability under the sampler
    lags: np.ndarray  # int64 [M]: (step - 1) - step of the version that sampled the token
    one_version: bool = True  # else the cache of the segment was filled by several versions
    advantages: np.ndarray = field(default_factory=_nothing)  # float64 [M]
    weight: float = 0.0  # of each of its tokens in the loss
    reference: np.ndarray | None = None  # float32 [M]: log-probability under the reference model
    routes: np.ndarray | None = None  # uint8 or uint16 [T, L, K]: the sampler's experts; each input token has its own
    routes_ref: bytes = b""  # where they are, a serialized slipstream.types.v1.Routes; empty: they came with the sample
    origin: tuple[int, int, int] = (-1, -1, -1)  # draw, sample, segment
    place: tuple[int, int] = (-1, -1)  # its group and its sample, each numbered within the batch
    proximal: np.ndarray | None = None  # [M]: log-probability under the policy before the first of several mini-steps
    turns: np.ndarray | None = None  # int64 [M]: model call of the episode that generated the token
    rewards: np.ndarray | None = None  # float64 [M], when the sample's reward is spread over its tokens
    values: np.ndarray = field(default_factory=_nothing)  # float64 [M]: of the critic, before this step; or empty
    returns: np.ndarray = field(default_factory=_nothing)  # float64 [M]: what it learns
    outcomes: np.ndarray = field(default_factory=_nothing)  # float64 [M]: what came, discounted


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward and backward pass takes."""

    inputs: np.ndarray  # int64 [R, T]
    index: np.ndarray  # int64 [M]: row * T + position
    rows: np.ndarray  # int64 [M]: segment of the token, numbered within the micro-batch
    targets: np.ndarray  # int64 [M]
    behaviour: np.ndarray  # float32 [M]
    advantages: np.ndarray  # float32 [M]
    weights: np.ndarray  # float64 [M]
    lags: np.ndarray  # int64 [M]
    fresh: np.ndarray  # bool [M]: sampled with the very weights that are trained now
    reference: np.ndarray | None  # float32 [M]
    routes: np.ndarray | None = None  # uint8 or uint16 [R, T, L, K], when a row has some
    routed: np.ndarray | None = None  # bool [R, T]: where `routes` holds; not in padding, nor in rows without
    lengths: np.ndarray | None = None  # int64 [R]: inputs of each row without its padding
    values: np.ndarray = field(default_factory=_nothing)  # float64 [M]; empty without a critic
    returns: np.ndarray = field(default_factory=_nothing)  # float64 [M]; empty without a critic
    proximal: np.ndarray | None = None  # [M], when its rows have it
    starts: np.ndarray = field(default_factory=_none)  # int64 [S]: row * T + position of the first input of each segment
    sizes: np.ndarray = field(default_factory=_none)  # int64 [S]: inputs of each segment
    members: np.ndarray = field(default_factory=_none)  # int64 [S]: which of the rows that were cut each segment is
    positions: np.ndarray | None = None  # int64 [R, T], in its segment; None: those of the row, which is one segment


Fill = Callable[[list[Row]], list[Row]]  # the same rows with a field filled in


def trained_rows(
    groups: Sequence[Group], step: int, objective: Objective, score: Fill | None = None, value: Fill | None = None,
    counted: bool = False,
) -> list[Row]:
    """Rows of batch `step`, with advantages, and weights over the whole batch; those that cannot move anything are left out.

    `score` fills in log-probabilities under the reference model; it is needed, and given all rows, only when a divergence is
    taken off the rewards. `value` fills in what a critic expects, when there is one. `counted` keeps rows that move nothing, as
    their advantage is 0, and yet are in the denominators. Raises InvalidInput that names draw and sample when a segment of a
    row is malformed.
    """
    samples = [(group, member) for group in groups for member in sorted(group.members, key=lambda m: m.index)]
    numbers = group_numbers([len(g.members) for g in groups])
    truncated = np.array([member.sample.finish_reason == FINISH_LENGTH for _, member in samples], bool)
    if objective.per_token:
        return _rows_by_token(samples, numbers, truncated, step, objective, score, value, counted)
    rows: list[list[Row]] | None = None
    if objective.kl_in_reward:
        assert score is not None
        rows = [score(_rows(group, member, step)) for group, member in samples]
    terms = objective.samples(
        np.array([member.reward for _, member in samples]), numbers,
        np.array([trained_tokens(member.sample, group.mask_below_step) for group, member in samples], np.int64), truncated,
        None if rows is None else np.array([sum(float(_divergence(row).sum()) for row in found) for found in rows]))
    return [
        replace(row, advantages=np.full(len(row.index), advantage), weight=weight, place=(int(numbers[i]), i))
        for i, (advantage, weight) in enumerate(zip(terms.advantages.tolist(), terms.weights.tolist(), strict=True))
        if weight and (counted or advantage or objective.moves_without_advantage)
        for row in (rows[i] if rows is not None else _rows(*samples[i], step))]


def _rows_by_token(
    samples: Sequence[tuple[Group, Member]], numbers: np.ndarray, truncated: np.ndarray, step: int, objective: Objective,
    score: Fill | None, value: Fill | None, counted: bool,
) -> list[Row]:
    """Where tokens of a sample differ in their advantages: its rows are joined in the order of its model calls."""
    parts = [_rows(group, member, step, by_turn=True) for group, member in samples]
    ends = np.cumsum([len(part) for part in parts])
    rows = [row for part in parts for row in part]
    for fill in (score if objective.kl_in_reward else None, value):
        rows = fill(rows) if fill is not None else rows
    of_sample = [rows[end - len(part) : end] for end, part in zip(ends.tolist(), parts, strict=True)]
    orders = [np.argsort(_joined([row.turns for row in found], np.int64), kind="stable") for found in of_sample]
    terms = objective.tokens(
        [_episode(member, found, order, objective)
         for (_, member), found, order in zip(samples, of_sample, orders, strict=True)], numbers, truncated)
    trained = []
    for i, (found, order) in enumerate(zip(of_sample, orders, strict=True)):
        advantages = _by_row(terms.advantages[i], order, found)
        returns, outcomes = (
            _by_row(terms_T[i], order, found) if terms_T is not None else [np.zeros(0)] * len(found)
            for terms_T in (terms.returns, terms.outcomes))
        trained += [
            replace(row, advantages=a, returns=r, outcomes=o, weight=float(terms.weights[i]), place=(int(numbers[i]), i))
            for row, a, r, o in zip(found, advantages, returns, outcomes, strict=True)
            if terms.weights[i] and (counted or value is not None or objective.moves(a))]
    return trained


def _episode(member: Member, rows: Sequence[Row], order: np.ndarray, objective: Objective) -> Episode:
    """The tokens of a sample's rows in the order of its model calls."""
    rewards = _joined([row.rewards for row in rows])[order] if member.rewards is not None else np.zeros(len(order))
    if member.rewards is None and len(order):
        rewards[-1] = member.reward
    if objective.kl_in_reward:
        rewards = rewards - objective.settings.kl_coefficient * _joined([_divergence(row) for row in rows])[order]
    values = _joined([row.values for row in rows])
    return Episode(
        rewards, _joined([row.turns for row in rows], np.int64)[order], values[order] if len(values) == len(order) else None)


def _by_row(values_T: np.ndarray, order: np.ndarray, rows: Sequence[Row]) -> list[np.ndarray]:
    """The inverse of joining and ordering: each row's part."""
    found = np.zeros(len(order))
    found[order] = values_T
    return np.split(found, np.cumsum([len(row.index) for row in rows])[:-1]) if rows else []


def _joined(parts: Sequence[np.ndarray | None], dtype: type = np.float64) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(part for part in parts if part is not None)])


def trained_tokens(sample: Sample, mask_below_step: int = 0) -> int:
    """Generated tokens of versions from `mask_below_step` on."""
    return sum(
        span.length for segment in sample.segments for span in segment.spans if span.step >= mask_below_step)


def _rows(group: Group, member: Member, step: int, by_turn: bool = False) -> list[Row]:
    segments = member.sample.segments
    turns = turn_numbers(member.sample) if by_turn else [None] * len(segments)
    rewards: Sequence[np.ndarray | None] = [None] * len(segments)
    if by_turn and member.rewards is not None:
        rewards = np.split(member.rewards, np.cumsum([len(s.logprobs) for s in segments])[:-1])
    origins = [(group.draw, member.index, i) for i in range(len(segments))]
    found = (_row(s, step, group.mask_below_step, origins[i], turns[i], rewards[i]) for i, s in enumerate(segments))
    return [row for row in found if row]


def _divergence(row: Row) -> np.ndarray:
    """k1 = log mu - log ref at the row's trained tokens: float64 [M]."""
    assert row.reference is not None
    return row.behaviour.astype(np.float64) - row.reference


def microbatches(rows: Sequence[Row], tokens_per_microbatch: int, packed: bool = False) -> list[Microbatch]:
    """Rows, longest first, cut so that rows x longest stays within the budget; or packed into one row each (`best_fit`)."""
    if packed:
        return [_laid(rows, part, True) for part in best_fit([len(row.inputs) for row in rows], tokens_per_microbatch)]
    ordered = sorted(range(len(rows)), key=lambda i: -len(rows[i].inputs))
    batches, start = [], 0
    while start < len(ordered):
        count = max(1, tokens_per_microbatch // len(rows[ordered[start]].inputs))
        batches.append(_laid(rows, ordered[start : start + count], False))
        start += count
    return batches


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Which segments share a packed row of at most `capacity` tokens; a longer one has a row for itself.

    Best fit decreasing: longest first (stable), each into the row that it leaves the least room in, the first of several; else
    into a new one. At most 11/9 of the fewest rows possible, plus 4 (Johnson et al., SIAM J. Comput. 3, 1974). Rows come in the
    order in which they were opened, and each begins with its longest segment.

    Example: sizes 4 7 3 5 1, capacity 10. 7 opens a row, 5 another; 4 fits the second alone (9), 3 the first (10), 1 the second
    (10): [[1, 2], [3, 0, 4]].
    """
    parts: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        place = bisect_left(rooms, (sizes[i], -1))
        if place == len(rooms):
            parts.append([i])
            left, row = capacity - sizes[i], len(parts) - 1
        else:
            left, row = rooms.pop(place)
            parts[row].append(i)
            left -= sizes[i]
        insort(rooms, (left, row))
    return parts


def in_order_of(rows: Sequence[Row], batches: Sequence[Microbatch], parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the micro-batches of these rows gave, [M] each, as one array a row, in the order of `rows`."""
    found: dict[int, np.ndarray] = {}
    for batch, part in zip(batches, parts, strict=True):
        members = batch.members.tolist()
        pieces = np.split(part, np.cumsum([len(rows[i].index) for i in members])[:-1]) if members else []
        found.update(zip(members, pieces, strict=True))
    return [found[i] for i in range(len(rows))]


def without_signal(groups: Sequence[Group]) -> int:
    """Number of groups whose rewards are all equal."""
    return sum(nothing_to_compare(np.array([m.reward for m in g.members])) for g in groups)


def lag_histogram(groups: Sequence[Group], step: int) -> Counter[int]:
    """Generated tokens of the whole batch by lag, (step - 1) - step of the version that sampled them."""
    histogram: Counter[int] = Counter()
    for group in groups:
        for member in group.members:
            for segment in member.sample.segments:
                for span in segment.spans:
                    histogram[step - 1 - span.step] += span.length
    return histogram


def _row(
    segment: Segment, step: int, mask_below_step: int, origin: tuple[int, int, int], turns: np.ndarray | None,
    rewards: np.ndarray | None,
) -> Row | None:
    place = f"draw {origin[0]}, sample {origin[1]}, segment {origin[2]}"
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
    kept = steps >= mask_below_step
    if not kept.any():
        return None
    positions = positions[kept]
    versions = {(span.version, span.incarnation) for span in segment.spans}
    return Row(
        segment.tokens[:-1], positions - 1, segment.tokens[positions], segment.logprobs[kept], step - 1 - steps[kept],
        len(versions) == 1, routes=_routes(segment, place), turns=None if turns is None else turns[kept],
        routes_ref=segment.routes_ref.SerializeToString() if segment.routes_ref is not None else b"",
        rewards=None if rewards is None else rewards[kept], origin=origin)


def _routes(segment: Segment, place: str) -> np.ndarray | None:
    """Its routes are of its inputs: the last token never entered the sampler's model, and has none."""
    routes = segment.routes
    if routes is not None and (routes.ndim != 3 or len(routes) != len(segment.tokens) - 1):
        raise InvalidInput(
            f"{place}: routes of shape {routes.shape} for {len(segment.tokens)} tokens; [T - 1, L, K] is needed",
            "LENGTH_MISMATCH", field="routes")
    return routes


def _laid_routes(
    rows: Sequence[Row], starts: np.ndarray, shape: tuple[int, int],
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """[R, T, L, K] and where they hold, [R, T]."""
    shapes = {row.routes.shape[1:] for row in rows if row.routes is not None}
    if not shapes:
        return None, None
    if len(shapes) > 1:
        raise InvalidInput(
            f"routes of {' and '.join(map(str, sorted(shapes)))} (layers, experts) in one batch: samplers ran different models",
            "ROUTES_SHAPE", field="routes")
    dtype, of_token = np.result_type(*(row.routes.dtype for row in rows if row.routes is not None)), shapes.pop()
    routes, routed = np.zeros((shape[0] * shape[1], *of_token), dtype), np.zeros(shape[0] * shape[1], bool)
    for row, start in zip(rows, starts.tolist(), strict=True):
        if row.routes is not None:
            routes[start : start + len(row.routes)], routed[start : start + len(row.routes)] = row.routes, True
    return routes.reshape(*shape, *of_token), routed.reshape(shape)


def _laid(all_rows: Sequence[Row], members: Sequence[int], packed: bool) -> Microbatch:
    """A micro-batch of these segments: a row for each, or one row of all."""
    rows, sizes = [all_rows[i] for i in members], np.array([len(all_rows[i].inputs) for i in members], np.int64)
    lines, width = (1, int(sizes.sum())) if packed else (len(rows), int(sizes.max()))
    starts = np.cumsum(sizes) - sizes if packed else np.arange(lines) * width
    inputs = np.full(lines * width, PAD_ID, np.int64)
    for row, start in zip(rows, starts.tolist(), strict=True):
        inputs[start : start + len(row.inputs)] = row.inputs
    counts = [len(row.index) for row in rows]

    def per_token(values: Sequence[float] | np.ndarray, dtype: type = np.float32) -> np.ndarray:
        return np.repeat(np.array(values, dtype), counts)

    lags = np.concatenate([row.lags for row in rows]).astype(np.int64)
    references = [row.reference for row in rows if row.reference is not None]
    proximal = [row.proximal for row in rows if row.proximal is not None]
    return Microbatch(
        inputs.reshape(lines, width),
        np.concatenate([row.index for row in rows]) + per_token(starts, np.int64),
        per_token(range(len(rows)), np.int64),
        np.concatenate([row.targets for row in rows]).astype(np.int64),
        np.concatenate([row.behaviour for row in rows]).astype(np.float32),
        np.concatenate([
            row.advantages if len(row.advantages) else np.zeros(len(row.index)) for row in rows]).astype(np.float32),
        per_token([row.weight for row in rows], np.float64),
        lags,
        (lags == 0) & per_token([row.one_version for row in rows], np.bool_),
        np.concatenate(references) if references else None,
        *_laid_routes(rows, starts, (lines, width)),
        np.array([width], np.int64) if packed else sizes,
        _joined([row.values for row in rows]), _joined([row.returns for row in rows]),
        np.concatenate(proximal) if proximal else None,
        starts, sizes, np.array(members, np.int64),
        (np.arange(width) - np.repeat(starts, sizes))[None] if packed and len(rows) > 1 else None,
    )
