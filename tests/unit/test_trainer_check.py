"""What a trainer's start says of a model and a run file that do not fit each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.check import positions_suffice
from slipstream.errors import ConfigError
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
