"""The checksum of what enters the loss: every part of it counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from services.trainer.batches import trained_crc32c
from services.trainer.packing import Member
from slipstream.sample import Sample, Segment, Span

SEGMENT = Segment(
    np.array([5, 6, 7], np.int32), np.array([False, True, True]), np.array([-0.5, -0.25], np.float32), (Span(1, 0, 1, 2),))


@pytest.mark.parametrize("other", [
    {"tokens": np.array([5, 6, 8], np.int32)}, {"loss_mask": np.array([True, True, False])},
    {"logprobs": np.array([-0.5, -0.26], np.float32)}])
def test_each_array_counts(other: dict[str, np.ndarray]) -> None:
    """Other tokens, another mask or other log-probabilities are other data."""
    changed = dataclasses.replace(SEGMENT, **other)
    assert trained_crc32c(Member(0, Sample([SEGMENT]), 1.0), 0) != trained_crc32c(Member(0, Sample([changed]), 1.0), 0)


def test_reward_and_mask_count() -> None:
    """The same tokens with another reward, or with some of them masked, train something else; versions are not trained."""
    same = trained_crc32c(Member(0, Sample([SEGMENT]), 1.0), 0)
    assert same != trained_crc32c(Member(0, Sample([SEGMENT]), 0.5), 0)
    assert same != trained_crc32c(Member(0, Sample([SEGMENT]), 1.0), 3)
    moved = dataclasses.replace(SEGMENT, spans=(Span(9, 8, 2, 2),))
    assert same == trained_crc32c(Member(4, Sample([moved]), 1.0), 0)
