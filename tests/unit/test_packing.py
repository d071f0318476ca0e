"""From groups to micro-batches and back: nothing is lost, nothing foreign reaches the loss, and the order is fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.packed_attention import layout, stretches
from services.trainer.packing import (
    Group,
    Member,
    best_fit,
    in_order_of,
    lag_histogram,
    microbatches,
    trained_rows,
    without_signal,
)
from slipstream.errors import InvalidInput
from slipstream.sample import Sample, Segment, Span
from tests.trainer_samples import OBJECTIVE, groups, segment


def one(*segments: Segment, mask_below_step: int = 0) -> Group:
    """A group of two samples, the first of which is under test and has A > 0."""
    return Group(7, [Member(0, Sample(list(segments)), 1.0), Member(1, Sample([segment([2], [3])]), 0.0)], mask_below_step)


def test_the_worked_example():
    """Tokens 5 6 7 8 9 with mask 0 0 0 1 1: inputs 5 6 7 8, predicting positions 2 3, targets 8 9."""
    row = trained_rows([one(segment([5, 6, 7], [8, 9], [-0.5, -0.25], step=3))], 5, OBJECTIVE)[0]
    assert row.inputs.tolist() == [5, 6, 7, 8]
    assert row.index.tolist() == [2, 3]
    assert row.targets.tolist() == [8, 9]
    assert row.behaviour.tolist() == [-0.5, -0.25]
    assert row.lags.tolist() == [1, 1]
    assert row.advantages[0] == pytest.approx(0.5**0.5, rel=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 16, 40, 10_000])
def test_round_trip(budget, packed):
    """Every trained token is found again, once, with its own prefix, log-probability and advantage, for any budget, and at its
    position of the segment."""
    batch = groups(6, 4, seed=3)
    found, rows = [], trained_rows(batch, 1, OBJECTIVE)
    batches = microbatches(rows, budget, packed)
    for micro in batches:
        assert micro.inputs.size <= budget or len(micro.sizes) == 1
        for m, place in enumerate(micro.index):
            start = int(micro.starts[micro.rows[m]])
            prefix = micro.inputs.reshape(-1)[start : place + 1]
            assert micro.positions is None or micro.positions[0, start : place + 1].tolist() == list(range(len(prefix)))
            found.append(([*prefix.tolist(), int(micro.targets[m])], float(micro.behaviour[m]), micro.advantages[m] > 0))
    expected = []
    for group in batch:
        for member in group.members:
            [s] = member.sample.segments
            for logprob, t in zip(s.logprobs, np.flatnonzero(s.loss_mask), strict=True):
                expected.append((s.tokens[: t + 1].tolist(), float(logprob), member.reward > 0))
    assert sorted(found) == sorted(expected)
    assert np.array_equal(np.concatenate(in_order_of(rows, batches, [b.targets for b in batches])), np.concatenate(
        [row.targets for row in rows]))


def test_the_worked_example_of_packing():
    """Sizes 4 7 3 5 1 in rows of 10: two full ones, longest first in each; one that is too long has a row for itself."""
    assert best_fit([4, 7, 3, 5, 1], 10) == [[1, 2], [3, 0, 4]]
    assert best_fit([12, 10, 1], 10) == [[0], [1], [2]] and best_fit([], 10) == []


def test_packed_rows_are_nearly_full():
    """On lengths with a long tail, a hundredth is missing where rows of one segment are a sixth padding; none is lost."""
    sizes = np.minimum(8 * (1 + np.random.default_rng(0).pareto(1.5, 400)), 512).astype(int).tolist()
    parts = best_fit(sizes, 1024)
    assert sorted(i for part in parts for i in part) == list(range(400))
    assert len(parts) == -(-sum(sizes) // 1024) and all(sum(sizes[i] for i in part) <= 1024 for part in parts)
    assert all(sizes[part[0]] == max(sizes[i] for i in part) for part in parts)


def test_attention_is_computed_in_stretches_of_about_one_length():
    """The worked example; and a row taken apart into stretches is itself again."""
    assert stretches([4, 9, 8, 3, 9]) == [[1, 4, 2], [0, 3]]
    sizes = np.array([9, 4, 8, 3, 8])  # padding in the middle of a stretch, and at its end
    found = layout(np.cumsum(sizes) - sizes, sizes, torch.device("cpu"))
    taken = torch.cat([torch.arange(32)[stretch.index_SL] for stretch in found.stretches])
    assert torch.equal(taken[found.back_N], torch.arange(32)) and len(taken) == 27 + 8


def test_the_same_batch_gives_the_same_tensors():
    """Packing is a pure function of the batch, longest rows first."""
    first, second = (microbatches(trained_rows(groups(seed=5), 1, OBJECTIVE), 64) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a.inputs, b.inputs)
        np.testing.assert_array_equal(a.index, b.index)
    widths = [m.inputs.shape[1] for m in first]
    assert widths == sorted(widths, reverse=True)


def test_groups_without_signal_are_left_out():
    """Equal rewards and single samples give no rows at all, whatever their tokens."""
    batch = [*groups(2, rewards=(0.3,)), Group(9, groups(1)[0].members[:1])]
    assert trained_rows(batch, 1, OBJECTIVE) == []
    assert without_signal(batch) == 3


def test_segments_are_rows_but_samples_are_counted():
    """A sample of two segments is two rows with one advantage, computed among samples."""
    rows = trained_rows([one(segment([2, 3], [4]), segment([2, 3, 4, 5], [6, 7]))], 1, OBJECTIVE)
    assert [len(row.targets) for row in rows] == [1, 2, 1]
    assert rows[0].advantages[0] == rows[1].advantages[0] == -rows[2].advantages[0]


def test_tokens_between_turns_are_context():
    """A tool's tokens in the middle of a segment are inputs, never targets."""
    tokens = np.array([2, 3, 4, 5, 6, 7], np.int32)
    mask = np.array([0, 1, 0, 0, 1, 1], bool)
    row = trained_rows([one(Segment(tokens, mask, np.full(3, -1, np.float32), (Span(1, 0, 1, 3),)))], 1, OBJECTIVE)[0]
    assert row.targets.tolist() == [3, 6, 7]
    assert row.index.tolist() == [0, 3, 4]


def test_tokens_below_the_mask_step_are_context():
    """Over-lag policy `mask`: old tokens stay in the inputs and leave the loss; a row without any left disappears."""
    both = Segment(np.array([2, 3, 4, 5], np.int32), np.array([0, 1, 1, 1], bool), np.array([-1, -2, -3], np.float32),
                   (Span(5, 4, 1, 1), Span(7, 6, 1, 2)))
    row = trained_rows([one(both, mask_below_step=6)], 8, OBJECTIVE)[0]
    assert row.targets.tolist() == [4, 5]
    assert row.behaviour.tolist() == [-2, -3]
    assert not row.one_version, "two versions filled this segment's cache"
    assert row.inputs.tolist() == [2, 3, 4]
    assert trained_rows([one(both, mask_below_step=7)], 8, OBJECTIVE) == []


def test_lags_are_counted_per_token():
    """Over all generated tokens of the batch, trained or not: (step - 1) - step of the version."""
    batch = groups(1, 1, step=2) + groups(1, 1, step=4)
    histogram = lag_histogram(batch, 5)
    assert set(histogram) == {0, 2}
    assert sum(histogram.values()) == sum(m.sample.generated_tokens for g in batch for m in g.members)


@pytest.mark.parametrize(("broken", "reason"), [
    (segment([], [2, 3]), "FIRST_TOKEN"),
    (segment([2], [3], [-1.0, -1.0]), "LENGTH_MISMATCH"),
    (Segment(np.array([2, 3], np.int32), np.array([0, 1], bool), np.zeros(1, np.float32), ()), "LENGTH_MISMATCH"),
])
def test_malformed_samples_are_named(broken, reason):
    """Draw, sample and segment are in the message; nothing malformed is trained."""
    with pytest.raises(InvalidInput, match="draw 7, sample 0, segment 0") as caught:
        trained_rows([one(broken)], 1, OBJECTIVE)
    assert caught.value.reason == reason
