"""Packed rows: the step of a row for each segment, in double precision, and no segment that sees another.

What the rest of a step makes of it, several ranks too, is in tests/parallel/test_equality.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import packed_attention
from services.trainer.learner import Learner
from services.trainer.packing import Row, in_order_of, trained_rows
from services.trainer.ranks import Alone
from slipstream import config
from slipstream.errors import ConfigError
from tests.parallel.context_cases import SHAPES
from tests.parallel.exact import exact
from tests.parallel.test_context import JAMBA
from tests.trainer_samples import CHARS, EXACT, OBJECTIVE, groups, run_file

BUDGET = 40  # tokens of a micro-batch: some segments share a row, and there are several rows
FAMILIES = EXACT | SHAPES
QUICK = ("gpt2", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next")


def run(family: str, packing: str, shape: dict[str, Any] | None = None) -> config.RunFile:
    """In float64, which no run file may ask for."""
    build = {"model_type": family, "tokenizer_chars": CHARS, "config": shape or FAMILIES[family]}
    found = run_file(model={"build": build, "experts": "batched_mm"}, trainer={"packing": packing})
    return found.model_copy(update={"model": found.model.model_copy(update={"dtype": "float64"})})


def scored(family: str, packing: str, rows: list[Row]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Any]]:
    """Log-probabilities in the order of `rows`, gradients of a sum that weighs each token differently, the micro-batches."""
    ranks = Alone(run(family, packing))
    model = ranks.built(ranks.run.model)[0].double()  # routers that stay in float32, too
    with exact():
        score, batches = ranks.scorer(model), ranks.microbatches(rows, BUDGET)
        found = [score(batch)[0] for batch in batches]
        weighted = [(part * torch.from_numpy(batch.behaviour)).sum() for part, batch in zip(found, batches, strict=True)]
        torch.stack(weighted).sum().backward()
    ordered = in_order_of(rows, batches, [part.detach().numpy() for part in found])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.from_numpy(np.concatenate(ordered)), gradients, batches


@pytest.mark.parametrize("family", [
    family if family in QUICK else pytest.param(family, marks=[pytest.mark.slow, pytest.mark.nightly]) for family in FAMILIES])
def test_a_packed_row_is_its_segments_alone(family: str) -> None:
    """Log-probabilities and every gradient: full attention and windows shorter than a segment, sinks, latent and linear
    attention, shared heads of keys, learnt positions (gpt2), where one that does not restart is another embedding."""
    rows = trained_rows(groups(2, seed=3), 1, OBJECTIVE)
    expected, gradients, padded = scored(family, "rows", rows)
    found, packed_gradients, packed = scored(family, "packed", rows)
    assert len(packed) > 1 and all(len(batch.sizes) > 1 for batch in packed)
    assert sum(b.inputs.size for b in packed) == sum(len(row.inputs) for row in rows) < sum(b.inputs.size for b in padded)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert packed_gradients.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(packed_gradients[name], value, rtol=0, atol=1e-12 * max(1, float(value.abs().max())))


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_no_segment_sees_another(family: str) -> None:
    """Other tokens in one segment move its own log-probabilities and no other's, to the bit. Each is a segment of one row."""
    ranks = Alone(run(family, "packed"))
    model, _ = ranks.built(ranks.run.model)
    score = ranks.scorer(model)
    [batch] = ranks.microbatches(trained_rows(groups(1, seed=3), 1, OBJECTIVE), 1000)
    before = score(batch)[0]
    for number, (start, size) in enumerate(zip(batch.starts, batch.sizes, strict=True)):
        kept = batch.inputs[0, start : start + size].copy()
        batch.inputs[0, start : start + size] = (kept + 3) % 11 + 1
        moved = (score(batch)[0] - before).abs() > 1e-9
        batch.inputs[0, start : start + size] = kept
        assert bool(moved.any()) and set(batch.rows[moved.numpy()]) == {number}


def test_a_state_along_the_row_is_refused() -> None:
    """Mamba carries what it has read into the next segment: by name, before anything is trained."""
    with pytest.raises(ConfigError, match="JambaForCausalLM.*carry a state along a row.*set trainer.packing = rows"):
        Learner(run("jamba", "packed", JAMBA))


def test_a_model_that_looks_along_the_row_is_found_out_by_trying() -> None:
    """Nothing in its configuration tells: its logits do."""
    ranks = Alone(run("gpt2", "packed"))
    model, _ = ranks.built(ranks.run.model)
    packed_attention.verify(model)
    model.transformer.h[0].register_forward_hook(lambda _, __, hidden: hidden + 0.01 * hidden.cumsum(1))
    with pytest.raises(ConfigError, match="computes something else from segments that share a row"):
        packed_attention.verify(model)


def test_what_packing_does_not_go_with_is_refused() -> None:
    """A rope that depends on the length of what it is given."""
    shape = SHAPES["qwen3_moe"] | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match="rope_type dynamic depends on the length"):
        Learner(run("qwen3_moe", "packed", shape))
