"""Experts that change places are the same model under other labels, and the places are better ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.parallel import placement
from services.trainer.parallel import route_plans as plans
from slipstream import config
from slipstream.errors import ConfigError
from slipstream.model import build
from tests.parallel.families import FAMILIES
from tests.trainer_samples import CHARS

GROUPED = ("deepseek_v3", "glm4_moe")  # two groups, of which a token takes one
TEXTS = ["0123456789=", "11=22=33=44", "9876543210==0", "5=5=5=5=5=5=5"]


def model(family: str, **shape: Any) -> tuple[Any, Any]:
    """A tiny one whose routers have opinions."""
    known = FAMILIES[family] | {"initializer_range": 0.3} | shape
    settings = config.Model.model_validate({"build": {"model_type": family, "tokenizer_chars": CHARS, "config": known}})
    made, tokenizer = build(settings, 3)
    return made.eval(), tokenizer


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[] if family == "gpt_oss" else [pytest.mark.slow, pytest.mark.nightly]) for family in FAMILIES])
def test_experts_change_places_and_nothing_else_changes(family: str) -> None:
    """Another order in each layer: the same logits, by the same experts; where groups tie labels the model is refused."""
    made, tokenizer = model(family)
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    layers = len(placement.experts_of(made))
    order = [[2, 0, 3, 1], [1, 3, 0, 2]][:layers]
    weights = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    if family in GROUPED:
        with pytest.raises(ConfigError, match="is another model with its experts in other places"):
            placement.prove(made, order, rows)
        return
    placement.prove(made, order, rows)
    moved = [name for name, tensor in made.state_dict().items() if not torch.equal(tensor, weights[name])]
    assert moved and all("experts" in name or "gate" in name or "router" in name for name in moved)
    placement.reorder(made, [np.argsort(places).tolist() for places in order])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in made.state_dict().items()), "not what it was"


def test_a_proof_sees_a_router_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts without the rows that score them are another model."""
    made, tokenizer = model("gpt_oss")
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]

    @torch.no_grad()
    def forgetful(model: Any, order: Any) -> None:
        for experts, places in zip(placement.experts_of(model), order, strict=True):
            for tensor in experts.parameters():
                tensor.copy_(tensor[torch.tensor(places)])

    monkeypatch.setattr(placement, "reorder", forgetful)
    with pytest.raises(ConfigError, match="other places"):
        placement.prove(made, [[2, 0, 3, 1], [1, 3, 0, 2]], rows)


def test_places_are_planned_by_routes() -> None:
    """Two experts that all tokens take are on two ranks afterwards, and what belongs to one kind of text is on one node."""
    random = np.random.default_rng(0)
    routes = []
    for row in range(8):
        own = np.array([0, 4, 2, 6]) if row % 2 else np.array([1, 5, 3, 7])  # two kinds of text
        routes.append(np.array([[random.permutation(own)[:2]] for _ in range(16)]))
    found = placement.planned(routes, experts=8, ranks=4, width=2)
    assert found.load_after <= 1.15 and found.copies_saved >= 1
    assert [sorted(places) for places in found.order] == [list(range(8))]
    rank_E = np.argsort(np.array(found.order[0])) // 2
    loads = plans.load_of(np.concatenate([row[:, 0] for row in routes]), 8)
    assert plans.max_over_mean(loads, rank_E, 4) == pytest.approx(found.load_after)
    with pytest.raises(ConfigError, match="8 experts on 3 ranks"):
        placement.planned(routes, experts=8, ranks=3, width=1)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command_makes_a_directory_that_is_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaded with transformers' own names and layout; it says what it did, and refuses what it cannot do."""
    made, tokenizer = model("qwen3_moe")
    made.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    command = [str(tmp_path / "model"), str(tmp_path / "out"), "--texts", str(tmp_path / "texts"), "--ranks", "2",
               "--ranks-per-node", "1", "--dtype", "float32"]
    assert placement.main(command) == 0
    assert "the busiest of 2 ranks has" in capsys.readouterr().out
    other, _ = build(config.Model(path=str(tmp_path / "out")), 0)  # pyright: ignore
    ids = torch.tensor(tokenizer(TEXTS[0])["input_ids"])[None]
    with torch.no_grad():
        torch.testing.assert_close(other.eval()(input_ids=ids).logits, made(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
    order = json.loads((tmp_path / "out/placement.json").read_text())["order"]
    name = "model.layers.0.mlp.gate.weight"
    assert torch.equal(other.state_dict()[name], made.state_dict()[name][order[0]])
    assert placement.main(command) == 2 and "is not empty" in capsys.readouterr().err
    command[1], command[5] = str(tmp_path / "third"), "3"
    assert placement.main(command) == 2 and "4 experts on 3 ranks" in capsys.readouterr().err
    assert not (tmp_path / "third").exists()
