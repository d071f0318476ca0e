"""What a policy version's probes and checksums tell of an engine that loaded it: every lie, and nothing else.

A lie is planted in one tensor, in one of fifty ways: left at its former value, its rows or experts in another order, damaged.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.probes import Prober
from slipstream.errors import InvalidInput
from slipstream.manifest import checksum
from slipstream.model import state
from slipstream.probes import Probes, compare_checksums
from tests.engine_models import tiny

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")


@pytest.mark.parametrize("family", FAMILIES)
def test_probes_visit_every_expert_and_survive_their_manifest(family: str) -> None:
    prober = Prober(tiny(family), 64, 0)
    probes = prober.score()
    assert probes.experts_visited == probes.experts == prober.experts > 0
    again = Probes.parse(probes.plain())
    assert again.judge(probes.logprobs, "float32") == 0 and np.array_equal(again.tokens, probes.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_planted_lie_is_told(family: str) -> None:
    """Fifty lies over all tensors: what probes do not see, because it hardly matters, the checksums do."""
    model, former = tiny(family), tiny(family, seed=1)
    prober = Prober(model, 64, 0)
    probes = prober.score()
    published = {t.name: checksum(t.data) for t in state(model)}
    old = dict(former.state_dict())
    tensors = [(name, tensor) for name, tensor in model.state_dict().items() if tensor.ndim >= 2]
    told_by_probes, random = 0, np.random.default_rng(0)
    with torch.no_grad():
        for number in range(50):
            name, tensor = tensors[number % len(tensors)]
            kept = tensor.clone()
            lie = number // len(tensors) % 3
            if lie == 0:
                tensor.copy_(old[name])
            elif lie == 1:
                tensor.copy_(tensor[torch.from_numpy(np.roll(np.arange(len(tensor)), 1))])
            else:
                row = int(random.integers(len(tensor)))
                tensor[row] = tensor[row].flip(0)
            if not torch.equal(tensor, kept):
                with pytest.raises(InvalidInput, match="engine"):
                    compare_checksums(published, {t.name: checksum(t.data) for t in state(model)})
                try:
                    probes.judge(prober.score().logprobs, "float32")
                except InvalidInput:
                    told_by_probes += 1
            tensor.copy_(kept)
    assert told_by_probes > 40
    assert probes.judge(prober.score().logprobs, "float32") == 0


def test_a_scrambled_expert_is_told_by_the_probes_alone() -> None:
    """The fault of a known engine: experts repacked once, then overwritten; their bytes are hidden from checksums."""
    model = tiny("qwen3_moe")
    prober = Prober(model, 64, 0)
    probes = prober.score()
    parameters = [(n, p) for n, p in model.named_parameters() if "experts" in n]
    assert parameters
    with torch.no_grad():
        for _, stack in parameters:
            for expert in range(len(stack)):
                kept = stack[expert].clone()
                stack[expert] = kept.flip(0)
                with pytest.raises(InvalidInput, match="probe tokens"):
                    probes.judge(prober.score().logprobs, "float32")
                stack[expert] = kept


def test_a_gap_that_is_no_number_is_no_agreement() -> None:
    probes = Prober(tiny("qwen3_moe"), 64, 0).score()
    with pytest.raises(InvalidInput, match="probe tokens"):
        probes.judge(np.full_like(probes.logprobs, np.nan), "float32")
