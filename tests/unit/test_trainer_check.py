"""What a trainer's start says of a model and a run file that do not fit each other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.check import main, positions_suffice, prompts_leave_room, ranks_can_share
from slipstream.cli import preflight
from slipstream.errors import ConfigError
from slipstream.model import from_outline, outline
from tests.trainer_samples import run_file


def of(positions: int | None) -> Any:
    """A model with so many positions."""
    text = SimpleNamespace(max_position_embeddings=positions)
    return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))


def test_answers_beyond_the_models_positions_are_refused(caplog):
    """An answer that may be longer than the model has positions; only warned when prompt and answer together may; silent when
    rollout.context keeps both below it, whatever max_new_tokens says, and for a model without a limit."""
    long = run_file(rollout={"max_new_tokens": 100, "context": 128})
    with pytest.raises(ConfigError, match="max_new_tokens = 100 .*max_position_embeddings = 64, .* could have 100 tokens"):
        positions_suffice(of(64), long)
    positions_suffice(of(None), long)
    positions_suffice(of(64), run_file(rollout={"max_new_tokens": 100, "context": 64}))
    assert not caplog.text
    positions_suffice(of(100), long)
    assert "rollout.context = 128 exceeds the model's max_position_embeddings = 100" in caplog.text


@pytest.mark.parametrize(("parallel", "told"), [
    (dict(ranks=3, experts=3), r"parallel.experts = 3 does not divide the 4 experts"),
    (dict(ranks=8, tensor=8), r"parallel.tensor = 8 does not divide the 2 attention"),
    (dict(ranks=8, context=8), r"parallel.context = 8 does not fit .*: 8 .* does not divide its 2 attention heads"),
    (dict(ranks=2, experts=2), None),
])
def test_ranks_that_cannot_split_the_model_are_told_from_its_outline(parallel: dict[str, int], told: str | None):
    """Without weights and without a process group: what --dry-run and the start of a run look at."""
    run = run_file(trainer={"parallel": parallel})
    shape, _ = outline(run.model)
    with torch.device("meta"):
        empty = from_outline(shape, torch.float32, "grouped_mm")
    if told is None:
        return ranks_can_share(empty, run)
    with pytest.raises(ConfigError, match=told):
        ranks_can_share(empty, run)


async def test_a_context_that_no_prompt_fits_into_is_refused():
    """The shortest of the first prompts decides: one that fits is enough to learn from."""
    def settings(context: int, shortest: int) -> Any:
        run = run_file(rollout={"context": context})
        digits = run.environments[0].model_copy(update={"args": {"shortest": shortest, "longest": 8}})
        return run.model_copy(update={"environments": (digits,)})

    _, tokenizer = outline(run_file().model)
    with pytest.raises(ConfigError, match=r"environments.sort: 9 prompt tokens leave no room in a context of 9; raise rollout"):
        await prompts_leave_room(tokenizer, settings(context=9, shortest=8))
    await prompts_leave_room(tokenizer, settings(context=7, shortest=4))
    await prompts_leave_room(tokenizer, settings(context=10, shortest=8))


@pytest.mark.parametrize(("sections", "told"), [
    (dict(rollout={"context": 4}), "prompt tokens leave no room in a context of 4; raise rollout.context"),
    (dict(trainer={"parallel": {"ranks": 3, "experts": 3}}), "trainer.parallel.experts = 3 does not divide the 4 experts"),
])
def test_the_command_looks_at_prompts_and_ranks(sections: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """One line and exit code 2."""
    path = tmp_path / "run.json"
    path.write_text(run_file(**sections).model_dump_json())
    assert main(path) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_start_of_several_ranks_looks_at_the_model_first(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """One rank proves its model itself, and says so in its log; several would end with each other's last words."""
    async def refused(_: Any) -> None:
        raise ConfigError("looked")

    monkeypatch.setattr(preflight, "built_model", refused)
    run = run_file(trainer={"parallel": {"ranks": ranks}})
    if ranks == 1:
        return await preflight.check(run)
    with pytest.raises(ConfigError, match="looked"):
        await preflight.check(run)
