"""Families of experts, known to no code by name: train, publish, load with transformers, and compare log-probabilities."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.learner import Learner
from slipstream.manifest import RawTensor
from slipstream.model import load_state, skeleton
from tests.parallel import families, ranks
from tests.trainer_samples import groups

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(400)]
TOKENS = torch.arange(2, 13)[None]
GUIDE = Path(__file__).parents[2] / "docs/guides/expert-parallelism.md"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All families on four ranks: the folder of their directories, and what was published."""
    folder = tmp_path_factory.mktemp("families")
    return folder, ranks.run(4, families.train, list(families.FAMILIES), 4, str(folder), timeout_s=300)[0]


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    return torch.log_softmax(model.eval()(input_ids=TOKENS, use_cache=False).logits.float(), -1)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_four_ranks_publish_what_one_process_would(many: tuple[Path, dict[str, Any]], family: str) -> None:
    """One process, four ranks, the version that four ranks published, and their directory: one distribution."""
    folder, published = many
    single = Learner(families.run(family, 1))
    before = logprobs(single.model)
    for step in (1, 2):
        single.step(groups(5, seed=step), step)
    expected = logprobs(single.model)
    tensors, files = published[family]
    model, _ = skeleton(files)
    load_state(model, [RawTensor(*tensor) for tensor in tensors])
    loaded = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    assert float((expected - before).abs().max()) > 1e-3, "nothing was trained"
    torch.testing.assert_close(logprobs(model), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(logprobs(loaded), logprobs(model), rtol=0, atol=1e-6)


def test_the_table_in_the_guide_names_the_families_tested() -> None:
    """No more and no fewer."""
    named = re.findall(r"^\| `(\w+)` \|", GUIDE.read_text().partition("## Families tested")[2], re.MULTILINE)
    assert sorted(named) == sorted(families.FAMILIES)
