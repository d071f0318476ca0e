"""The surviving lineage: which trained steps the weights at the end contain, from the trainer's own records alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.audit import lineage


def step(k: int, draws: list[int], incarnation: int = 1, crc: int = 7) -> dict[str, Any]:
    """Batch k of two samples a draw; the fifth number is the checksum of what entered the loss."""
    return {"batch": k, "incarnation": incarnation, "samples": [[d, i, d, 1, crc + i] for d in draws for i in (0, 1)]}


def start(incarnation: int, at: int) -> dict[str, Any]:
    return {"version": 10 * incarnation, "step": at, "incarnation": incarnation, "weights": ""}


@pytest.fixture
def record(tmp_path: Path):
    """Write both records; the path of the trainer's."""
    def write(steps: list[dict[str, Any]], starts: list[dict[str, Any]] = []) -> Path:  # noqa: B006 - read only
        for name, lines in (("trainer", steps), ("versions", starts)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / "trainer.jsonl"
    return write


def test_steps_after_the_checkpoint_are_void(record) -> None:
    """Incarnation 2 goes back to checkpoint 1 and dies after batch 2; 3 goes back to 1 again. Each batch counts once."""
    found = lineage(record(
        [step(1, [0]), step(2, [1]), step(3, [2]), step(2, [1], 2), step(2, [1], 3), step(3, [2], 3)],
        [start(1, 0), start(2, 1), start(3, 1)]))
    assert sorted(found.batches) == [1, 2, 3]
    assert (found.incarnations, found.resumed, found.repeated, found.complaints) == (3, 3, 0, [])


def test_a_start_without_a_step_still_goes_back(record) -> None:
    """Incarnation 2 published checkpoint 1 and died before its first step: batch 2 is void until 3 trains it."""
    found = lineage(record([step(1, [0]), step(2, [1])], [start(1, 0), start(2, 1)]))
    assert sorted(found.batches) == [1]


def test_a_zombie_counts_for_nothing(record) -> None:
    """Incarnation 1 writes a line after 2 has begun: what survives is decided by incarnations, not by the order of lines."""
    found = lineage(record([step(1, [0]), step(2, [1], 2), step(2, [1], 1)], [start(1, 0), start(2, 1)]))
    assert sorted(found.batches) == [1, 2] and found.repeated == 0


def test_training_what_the_weights_contain_is_a_repeat(record) -> None:
    """Twice in one incarnation; or again by a later one that started from a checkpoint with the batch in it."""
    twice = lineage(record([step(1, [0]), step(1, [0])], [start(1, 0)]))
    assert twice.repeated == 2 and "batch 1 by incarnation 1" in twice.complaints[0]
    again = lineage(record([step(1, [0]), step(2, [1]), step(2, [1], 2)], [start(1, 0), start(2, 2)]))
    assert again.repeated == 2


def test_a_replayed_step_must_have_the_same_data(record) -> None:
    """Other arrays in the loss after a resume, with the same bodies: the batch was not replayed, it was changed."""
    found = lineage(record([step(1, [0]), step(1, [0], 2, crc=8)], [start(1, 0), start(2, 0)]))
    assert found.repeated > 0 and "other data" in found.complaints[0]


def test_a_gap_is_told(record) -> None:
    """A batch that the lineage lacks in its middle."""
    found = lineage(record([step(1, [0]), step(3, [2])], [start(1, 0)]))
    assert found.complaints == ["batch 3 by incarnation 1 follows batch 1: steps between are missing"]
