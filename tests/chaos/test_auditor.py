"""The auditor: from what workers were told and what the trainer wrote down, what was lost and what was trained twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.auditor import different_weights, judge

Write = Callable[..., Path]


def trained(k: int, *samples: tuple[int, int, int]) -> dict[str, Any]:
    """Batch k of (draw, index, checksum of the body)."""
    return {"batch": k, "incarnation": 1, "samples": [[d, i, crc, 1, 5] for d, i, crc in samples]}


def told(draw: int, sample: int, **what: Any) -> dict[str, Any]:
    return {"draw": draw, "sample": sample, "attempt": 1, "epoch": 1, **what}


@pytest.fixture
def run(tmp_path: Path) -> Write:
    """Write a run folder's evidence; every run has trained sample 0 of draw 0."""
    def write(acknowledged: list[dict], more: list[dict] = [], archived: list[dict] = []) -> Path:  # noqa: B006 - read only
        for name, lines in (
            ("audit/trainer.jsonl", [trained(1, (0, 0, 70)), *more]), ("audit/rollout-0.jsonl", [told(0, 0, crc=70)]),
            ("audit/rollout-1.jsonl", acknowledged), ("objects/ledger/001-000000000009.jsonl", archived),
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path
    return write


def test_an_acknowledged_sample_that_vanished_is_lost(run: Write) -> None:
    """Neither trained nor dropped by name, though a worker was told that it is held."""
    found = judge(run([told(3, 1, crc=9)]), [])
    assert found.lost == 1 and not found.clean
    assert found.complaints == ["sample 1 of draw 3 was acknowledged, but neither trained nor dropped by name"]


def test_dropped_by_name_is_not_lost(run: Write) -> None:
    """A dead letter of the draw or of the sample, archived or not yet; a draw that is still open."""
    folder = run(
        [told(3, 1, crc=9), told(4, 0, failure="broke"), told(5, 0, crc=1), told(6, 0, crc=1)],
        archived=[{"log": "dead", "draw": 3, "reason": "lag"}, {"log": "dead", "draw": 4, "index": 0, "reason": "broke"}])
    found = judge(folder, [{"log": "dead", "draw": 5, "reason": "timeout"}], opened=[6])
    assert found.clean and (found.lost, found.dropped, found.acknowledged) == (0, 3, 5)


def test_the_wrong_dead_letter_saves_nobody(run: Write) -> None:
    """A letter about another sample of the group, or an event of another log."""
    folder = run([told(4, 1, crc=9)], archived=[
        {"log": "dead", "draw": 4, "index": 0, "reason": "broke"}, {"log": "events", "draw": 4, "reason": "lag"}])
    assert judge(folder, []).lost == 1


def test_another_body_than_the_acknowledged_one_is_a_loss(run: Write) -> None:
    """Two bodies of one sample were acknowledged; only one can have been trained."""
    found = judge(run([told(0, 0, crc=71)]), [])
    assert found.lost == 1 and "another body" in found.complaints[0]


def test_repeats_come_from_the_lineage(run: Write) -> None:
    """A draw in two batches."""
    assert judge(run([], [trained(2, (0, 0, 70))]), []).repeated == 1


def test_no_evidence_is_no_proof(tmp_path: Path) -> None:
    """An empty run folder is not clean."""
    assert not judge(tmp_path, []).clean


def test_weights_are_compared_step_by_step(tmp_path: Path) -> None:
    """Every step that both published, every incarnation's; runs that end at different steps cannot be compared."""
    def versions(name: str, *lines: tuple[int, str]) -> Path:
        path = tmp_path / name / "audit" / "versions.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(
            json.dumps({"version": n, "step": step, "incarnation": 1, "weights": w}) + "\n"
            for n, (step, w) in enumerate(lines)))
        return tmp_path / name

    peace = versions("peace", (0, "a"), (1, "b"), (2, "c"))
    assert not different_weights(versions("same", (0, "a"), (1, "b"), (0, "a"), (1, "b"), (2, "c")), peace)
    assert different_weights(versions("astray", (0, "a"), (1, "x"), (0, "a"), (1, "b"), (2, "c")), peace) == [
        "the weights of step 1 differ from those of the undisturbed run"]
    assert different_weights(versions("short", (0, "a"), (1, "b")), peace)
    assert different_weights(versions("none"), peace)
