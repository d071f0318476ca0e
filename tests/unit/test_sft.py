"""`slipstream sft`: which tokens are learnt, that the loss is transformers' own, resume bit for bit, and bad rows by name."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import sft as sft_module
from services.trainer.learner import Learner
from services.trainer.sft import Course, Tuning, learning_rate, tune, validation_loss
from services.trainer.supervised import Reader
from slipstream.cli import preflight
from slipstream.config import Model, RunFile, Supervised, load, parse
from slipstream.errors import ConfigError
from slipstream.model import build, character_tokenizer
from tests.trainer_samples import run_file

RECORDS = [{"prompt": f"{n}=", "answer": "".join(sorted(str(n)))} for n in range(3100, 3140)]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last or m.role != 'assistant' else m.content.split('|')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}+{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def tuned_run(folder: Path, records: list[Any] | None = None, **sections: dict[str, Any]) -> RunFile:
    """A tiny run with a dataset of its own; `sections` override."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in (RECORDS if records is None else records)))
    settings = {"path": str(path), "rows": 8, "ramp_steps": 2, "validation": 0.1, "validate_every": 2}
    sections["sft"] = settings | sections.get("sft", {})
    sections["trainer"] = {"learning_rate": 1e-2, "checkpoint_every": 2, "tokens_per_microbatch": 24}
    return run_file(**{"folder": str(folder / "run"), **sections})


def reader(tokenizer: Any = None, **settings: Any) -> Reader:
    tokenizer = tokenizer or chat_tokenizer()
    return Reader(tokenizer, [tokenizer.eos_token_id], Supervised(path="rows.jsonl", **settings))


def chat_tokenizer() -> Any:
    tokenizer = character_tokenizer("0123456789=|+<>asitnuermy")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_is_that_of_transformers(tmp_path):
    """Several micro-batches of uneven rows: the `labels` loss of the model on the same tokens, in training and validation."""
    learner = Learner(tuned_run(tmp_path))
    rows = [reader(learner.tokenizer).rows(r, i)[0] for i, r in enumerate(
        [{"prompt": "31=", "answer": "13"}, {"prompt": "9=", "answer": 9}, {"prompt": "314159=", "answer": "113459"}])]
    ids, labels = torch.zeros((3, 14), dtype=torch.long), torch.full((3, 14), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row.inputs)] = torch.from_numpy(row.inputs).long()
        for place, target in zip(row.index.tolist(), row.targets.tolist(), strict=True):
            ids[i, place + 1], labels[i, place + 1] = target, target
    expected = learner.model(input_ids=ids, labels=labels).loss.item()
    assert (labels >= 0).sum() == 3 + 2 + 7, "answers and their ends, no prompt"
    assert validation_loss(learner, rows) == pytest.approx(expected, abs=1e-5)
    assert learner.supervised_step(rows, 1e-3, "step") == pytest.approx(expected, abs=1e-5)


def test_every_turn_of_the_assistant_is_learnt():
    """Two turns that the template only adds to are one row; a template that strips earlier thoughts opens a second row.

    An answer ends with the token that ends it for a sampler, and nothing behind that is learnt.
    """
    tokenizer = chat_tokenizer()

    def learnt(answers: list[str]) -> list[tuple[str, str]]:
        messages = [m for i, a in enumerate(answers) for m in (
            {"role": "user", "content": str(i)}, {"role": "assistant", "content": a})]
        return [(tokenizer.decode(r.inputs), tokenizer.decode(r.targets)) for r in reader().rows({"messages": messages}, 0)]

    [(seen, targets)] = learnt(["11", "22"])
    assert targets == "11<eos>22<eos>"
    assert seen == "<user>0+<assistant>11<eos>+<user>1+<assistant>22"
    first, second = learnt(["5|11", "6|22"])
    assert first == ("<user>0+<assistant>5|11", "5|11<eos>")
    assert second == ("<user>0+<assistant>11<eos>+<user>1+<assistant>6|22", "6|22<eos>")
    [row] = reader().rows({"messages": [{"role": "user", "content": "7"}], "answer": 9}, 0)
    assert tokenizer.decode(row.targets) == "9<eos>"
    [row] = reader(system="1").rows({"prompt": "7", "answer": 9}, 0)
    assert tokenizer.decode(row.inputs) == "<system>1+<user>7+<assistant>9"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "1="}, ["row 3", "neither 'prompt' nor 'messages' but question", "sft.prompt"]),
        ({"prompt": "", "answer": "1"}, ["row 3, prompt", "''", "needed"]),
        ({"prompt": "1=", "answer": None}, ["row 3, answer", "None", "sft.answer"]),
        ({"prompt": "1=", "answer": "é"}, ["'é'", "row 3, answer", "is a character missing?"]),
        ({"messages": "hello"}, ["row 3, messages", "'hello'", "list of messages"]),
        ({"messages": [{"content": "1"}]}, ["row 3, messages, message 0", "lacks role"]),
        ({"messages": [{"role": "user", "content": "1"}]}, ["row 3, messages", "the user's", "'answer'"]),
    ])
def test_bad_rows_are_refused_by_name(record, words):
    """File, row, field and remedy."""
    with pytest.raises(ConfigError) as refused:
        reader().rows(record, 3)
    assert all(word in str(refused.value) for word in [*words, ""]), refused.value


async def test_bad_datasets_are_refused_by_setting(tmp_path):
    """A path that is not there; rows that are too long; nothing left to train on; a chat without a template."""
    run = tuned_run(tmp_path)
    with pytest.raises(ConfigError, match=r"^sft.path = .*nowhere"):
        await tune(run.model_copy(update={"sft": Supervised(path=str(tmp_path / "nowhere"))}))
    with pytest.raises(ConfigError, match=r"rows.jsonl, row 0 has 10 tokens, sft.max_tokens = 9; raise it"):
        await tune(tuned_run(tmp_path, sft={"max_tokens": 9}))
    with pytest.raises(ConfigError, match=r"no row to train on: 40 rows, 4 of them held out, 40 too long"):
        await tune(tuned_run(tmp_path, sft={"max_tokens": 9, "too_long": "skip"}))
    with pytest.raises(ConfigError, match=r"row 0, messages: the tokenizer cannot render a chat"):
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        await tune(tuned_run(tmp_path, [{"messages": chat}]))


def test_order_of_the_rows(tmp_path):
    """Each epoch takes every training row once, in an order of its own; held-out rows never; a function of seed and step."""
    run = tuned_run(tmp_path, sft={"epochs": 3})

    def course(run: RunFile) -> Course:
        return Course(run, RECORDS, reader(character_tokenizer("0123456789=")))

    def key(row: Any) -> bytes:
        return row.inputs.tobytes()

    one = course(run)
    assert (len(one.training), len(one.validation), one.steps) == (36, 4, 14)
    taken = [key(row) for step in range(1, 10) for row in one.of_step(step)]
    assert Counter(taken[:36]) == Counter(taken[36:72]) == Counter(map(key, one.training))
    assert taken[:36] != taken[36:72]
    assert not {key(row) for row in one.validation} & set(taken)
    assert [key(row) for row in course(run).of_step(7)] == [key(row) for row in one.of_step(7)]
    other = course(run.model_copy(update={"run": run.run.model_copy(update={"seed": 1})}))
    assert [key(row) for row in other.of_step(1)] != [key(row) for row in one.of_step(1)]


def test_learning_rates(tmp_path):
    """Linear up, then constant, a line or a cosine down to (almost) nothing."""
    rates = {d: [learning_rate(tuned_run(tmp_path, sft={"decay": d}), k, 10) * 100 for k in (1, 2, 3, 7, 10)]
             for d in ("constant", "linear", "cosine")}
    assert rates["constant"] == pytest.approx([0.5, 1, 1, 1, 1])
    assert rates["linear"] == pytest.approx([0.5, 1, 1, 0.5, 0.125])
    assert rates["cosine"] == pytest.approx([0.5, 1, 1, 0.5, (1 + np.cos(np.pi * 7 / 8)) / 2])


@pytest.mark.parametrize("lora", [None, {"rank": 2, "save_merged": True}])
async def test_stopped_and_resumed_is_bitwise_the_undisturbed_run(tmp_path, monkeypatch, lora):
    """Stopped after step 3 and started again: the same model, one line a step, in both ways of training."""
    tmp_path.joinpath("whole").mkdir()
    tmp_path.joinpath("parts").mkdir()
    settings: dict[str, Any] = {"run": {"name": "test", "steps": 6}}
    model = {"model": {"build": run_file().model_dump()["model"]["build"], "lora": lora}}
    whole, parts = (tuned_run(tmp_path / name, **{**settings, **model, "run": {
        **settings["run"], "folder": str(tmp_path / name / "run")}}) for name in ("whole", "parts"))
    assert await tune(whole)
    begin = Tuning._next

    def stop_after_3(tuning: Tuning) -> dict[str, Any]:
        entry = begin(tuning)
        if tuning.step == 3:
            tuning.stopping.set()
        return entry

    monkeypatch.setattr(sft_module.Tuning, "_next", stop_after_3)
    assert not await tune(parts)
    assert not (parts.folder / "model").exists()
    monkeypatch.setattr(sft_module.Tuning, "_next", begin)
    assert await tune(parts)
    one, other = metrics(whole.folder), metrics(parts.folder)
    assert [m["step"] for m in other] == [1, 2, 3, 4, 5, 6]
    assert [m["loss"] for m in one] == [m["loss"] for m in other]
    assert [m["validation_loss"] is not None for m in one] == [False, True] * 3
    assert [m["incarnation"] for m in other] == [1, 1, 1, 2, 2, 2]
    assert one[0]["loss"] > one[-1]["loss"]
    for name in ("adapter_model.safetensors", "merged/model.safetensors") if lora else ("model.safetensors",):
        assert (whole.folder / "model" / name).read_bytes() == (parts.folder / "model" / name).read_bytes()
    build(Model(path=str(whole.folder / "model" / ("merged" if lora else ""))), 0)  # what model.path of a later run takes


def test_files_for_sft_alone(tmp_path):
    """Without [sft] a run file needs environments; with it `slipstream run` says what is missing."""
    run = tuned_run(tmp_path)
    alone = RunFile.model_validate(run.model_dump(mode="json") | {"environments": []})
    with pytest.raises(ConfigError, match=r"environments is empty.*slipstream sft"):
        asyncio.run(preflight.check(alone))
    with pytest.raises(ConfigError, match="no table \\[sft\\]"):
        asyncio.run(tune(run.model_copy(update={"sft": None})))
    with pytest.raises(ConfigError, match="environments is missing"):
        parse(run.model_dump(mode="json") | {"environments": [], "sft": None})


def test_the_examples_fit_together():
    """The second part of the campaign starts from what the first leaves; both, and the demo as an adapter, are valid."""
    examples = Path(__file__).parents[2] / "examples"
    first, second, demo = (load(examples / name) for name in ("sft/run.toml", "sft/rl.toml", "sort-digits/lora.toml"))
    assert first.sft is not None and not first.environments and (examples.parent / first.sft.path).is_file()
    assert second.model.path == f"runs/{first.run.name}/model" and second.model.lora and demo.model.lora
    assert demo.rollout == load(examples / "sort-digits" / "run.toml").rollout
