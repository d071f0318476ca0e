"""A checkpoint of many ranks: each writes its own part beside the steps, and any number of ranks goes on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.trainer.learner import Learner
from tests.parallel import checkpoint_cases, ranks


@pytest.mark.slow
@pytest.mark.nightly
def test_the_same_ranks_go_on_bit_for_bit_and_another_number_from_the_same_weights(tmp_path: Path) -> None:
    """Written beside a step; read by two ranks, and by one; then the other way round. Every rank wrote a part of its own."""
    wrote = ranks.run(2, checkpoint_cases.world, str(tmp_path), "written", timeout_s=200)[0]
    manifest = json.loads((tmp_path / "objects" / wrote["name"] / "manifest.json").read_text())
    sizes = {name: entry["size"] for name, entry in manifest["objects"].items() if name.startswith("weights")}
    assert manifest["ranks"] == 2 and len(sizes) == 2
    assert max(sizes.values()) < 0.6 * sum(sizes.values()), "one rank wrote most of it"

    again = ranks.run(2, checkpoint_cases.world, str(tmp_path), "resumed", timeout_s=200)[0]
    assert again == wrote, "the same mesh: bit for bit, also after the next step"
    one = checkpoint_cases.alone(tmp_path, checkpoint_cases.resumed)
    assert (one["name"], one["2"]) == (wrote["name"], wrote["2"])

    other = tmp_path / "other"
    first = checkpoint_cases.alone(other, checkpoint_cases.written)
    two = ranks.run(2, checkpoint_cases.world, str(other), "resumed")[0]
    assert (two["name"], two["2"]) == (first["name"], first["2"])


@pytest.mark.slow
@pytest.mark.nightly
def test_four_ranks_write_and_two_go_on(tmp_path: Path) -> None:
    """Experts on two of four ranks, sharded once more over the rest; each rank writes its part."""
    wrote = ranks.run(4, checkpoint_cases.world, str(tmp_path), "written", timeout_s=200)[0]
    manifest = json.loads((tmp_path / "objects" / wrote["name"] / "manifest.json").read_text())
    assert manifest["ranks"] == 4 and len([name for name in manifest["objects"] if name.startswith("weights")]) == 4
    two = ranks.run(2, checkpoint_cases.world, str(tmp_path), "resumed", timeout_s=200)[0]
    assert (two["name"], two["2"]) == (wrote["name"], wrote["2"])


@pytest.mark.slow
@pytest.mark.nightly
def test_what_fails_on_one_rank_is_told_on_rank_0_and_tried_again_by_all(tmp_path: Path) -> None:
    found = ranks.run(2, checkpoint_cases.world, str(tmp_path), "refused_once", "full")[0]
    assert found == {"told": "the disk of this rank is full", "between": 0, "after": 2}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rank_killed_in_the_middle_leaves_the_former_checkpoint_in_force(tmp_path: Path) -> None:
    """Its part is missing, so there is no manifest; the next start resumes from the one before."""
    with pytest.raises(ranks.RankError, match="rank . died"):
        ranks.run(2, checkpoint_cases.world, str(tmp_path), "killed", "kill")
    found = checkpoint_cases.alone(tmp_path, checkpoint_cases.resumed)
    assert "1" in found
    half = list((tmp_path / "objects" / "checkpoints").glob("00000002-*"))
    assert not any((folder / "manifest.json").exists() for folder in half)


def test_moments_are_read_into_the_optimizer_and_weights_into_the_model() -> None:
    """Nothing is held twice: see checkpoints.in_place."""
    from services.trainer.parallel.checkpoints import in_place

    learner = Learner(checkpoint_cases.run(Path("/nowhere"), {}))
    allocate = in_place({"weights": learner.model}, 0)
    weight = learner.model.model.norm.weight
    assert allocate("weights", "model.norm.weight", weight.shape, weight.dtype) is weight
    moment = allocate("optimizer", "model.norm.weight/exp_avg", weight.shape, weight.dtype)
    assert moment is not None and moment is not weight and moment.shape == weight.shape
    assert allocate("random", "1/torch", weight.shape, weight.dtype) is None
