"""Training an adapter: checkpoint, resume, versions, the reference, the sampler; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import peft
import pytest
import torch

from services.rollout.decoder import Decoder
from services.rollout.engine import Request
from services.rollout.weights import Weights
from services.trainer.learner import Learner
from services.trainer.packing import Row, microbatches
from services.trainer.replay import Replay, published
from slipstream import rpc
from slipstream.config import RunFile
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import FileEntry, read_complete, read_files, read_manifest, write_base, write_version
from slipstream.model import assembled, build
from slipstream.objects import FileStore
from tests.fake_buffer import FakeBuffer
from tests.trainer_samples import groups, run_file
from tests.unit.test_trainer_loop import Start, train

LORA: dict[str, Any] = {"rank": 2, "alpha": 4.0}


def lora_run(folder: Any = "", lora: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunFile:
    """tests.trainer_samples.run_file with `[model.lora]`."""
    model = {"lora": LORA | (lora or {})} | sections.pop("model", {})
    return run_file(folder, model=model, **sections)


def tensors(learner: Learner) -> dict[str, bytes]:
    return {t.name: bytes(t.data) for t in learner.weights()}


def test_only_the_adapter_is_trained_and_kept():
    """A checkpoint has A, B, their moments and the hash of the base; it is a small share of a checkpoint of the whole model.

    Loaded elsewhere it goes on bit for bit.
    """
    one, other, whole = Learner(lora_run()), Learner(lora_run()), Learner(run_file())
    base = {n: p.clone() for n, p in one.model.named_parameters() if not p.requires_grad}
    for learner in (one, whole):
        learner.step(groups(), 1)
    kept, all_kept = one.snapshot(), whole.snapshot()
    assert {name for name in kept.weights if "lora_" not in name} == {"base.sha256"}
    assert {name.split(".")[-2] for name in kept.optimizer} == {"lora_A", "lora_B"}
    size, all_size = (sum(t.nbytes for part in (s.weights, s.optimizer) for t in part.values()) for s in (kept, all_kept))
    assert size < all_size / 4, (size, all_size)
    other.load(kept)
    for learner in (one, other):
        learner.step(groups(seed=1), 2)
    assert tensors(one) == tensors(other)
    assert any(np.frombuffer(data, np.float32).any() for name, data in tensors(one).items() if "lora_B" in name)
    assert all(torch.equal(p, base[n]) for n, p in one.model.named_parameters() if n in base), "the base stays"


def test_a_checkpoint_of_another_base_is_refused():
    """The same shapes from another seed, or a checkpoint of a whole model: nothing is loaded, and the message says why."""
    learner = Learner(lora_run())
    before = tensors(learner)
    with pytest.raises(InvalidInput, match=r"trained on the weights .* model.path or model.build now gives"):
        learner.load(Learner(lora_run(run={"name": "test", "seed": 7})).snapshot())
    with pytest.raises(InvalidInput, match="of a run without model.lora"):
        learner.load(Learner(run_file()).snapshot())
    with pytest.raises(InvalidInput, match="another model"):
        Learner(run_file()).load(learner.snapshot())
    assert tensors(learner) == before


def test_the_reference_is_the_base_without_a_copy():
    """Its log-probabilities are those of the plain model, also once the adapter has moved; a second model is not built."""
    learner = Learner(lora_run(algorithm={"preset": "grpo", "kl": "k3+", "kl_coefficient": 0.1}))
    learner.start_reference()
    before = {id(p) for p in learner.model.parameters()}
    found = [learner.step(groups(seed=k), k) for k in (1, 2)]
    assert all(np.isfinite(m["loss"]) for m in found)
    plain = Learner(run_file())
    row = Row(
        np.array([3, 4, 5, 6], np.int32), np.array([2, 3]), np.array([7, 1], np.int32), np.zeros(2, np.float32),
        np.zeros(2, np.int64))
    [batch] = microbatches([row], 100)
    [referenced] = learner._with_reference([row])
    assert referenced.reference is not None and np.array_equal(referenced.reference, plain.forward(batch)[0].detach().numpy())
    assert not np.array_equal(referenced.reference, learner.forward(batch)[0].detach().numpy())
    assert {id(p) for p in learner.model.parameters()} == before


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
async def test_a_run_publishes_adapters_that_samplers_agree_with(tmp_path, family):
    """Versions are A and B beside a base that is written once; a sampler built from the store says what the trainer says, and
    PEFT and transformers load what the run leaves."""
    run, buffer = run_file(tmp_path, family, model={
        "build": run_file(family=family).model_dump()["model"]["build"], "lora": LORA | {"save_merged": True}}), FakeBuffer()
    assert await train(buffer, run) == 0
    store = FileStore(tmp_path / "objects")
    assert len([k for k in await store.list("bases/") if k.endswith(".safetensors")]) == 1
    _, step, version = buffer.kinds("publish")[-1]
    manifest = await read_manifest(store, version, "test")
    assert step == 4 and manifest.base is not None and all("lora_" in t.name for t in manifest.tensors)
    complete = await read_complete(store, manifest)
    small, full = sum(t.size for t in manifest.tensors), sum(t.size for t in complete if "lora_" not in t.name)
    assert small < full / 4
    model, _, merged = assembled(await read_files(store, manifest), complete)
    assert merged is not None
    decoder = Decoder(model, 8, 32, merged=merged)
    prompt = np.array([3, 4, 5, 12], np.int32)
    answer = decoder.decode([Request(prompt, 6, seed=3)])[0]
    trainer = Replay(run, store)
    await trainer.load(4)
    inputs = np.concatenate([prompt, answer.tokens])
    index = np.arange(len(prompt) - 1, len(inputs) - 1)
    row = Row(inputs[:-1], index, inputs[index + 1], answer.logprobs, np.zeros(len(index), np.int64))
    with torch.no_grad():
        logprobs = trainer.learner.forward(microbatches([row], 100)[0])[0].numpy()
    assert np.abs(logprobs - answer.logprobs).max() < 1e-5
    plain, _ = build(run.model.model_copy(update={"lora": None}), 0)
    whole, _ = build(run.model.model_copy(update={"lora": None, "build": None, "path": str(tmp_path / "model" / "merged")}), 0)
    loaded: Any = peft.PeftModel.from_pretrained(plain, str(tmp_path / "model"))
    ids = torch.from_numpy(inputs).long()[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        for found in (loaded.eval(), whole.eval()):
            assert (found(input_ids=ids, use_cache=False).logits - expected).abs().max() < 1e-5


async def test_stopped_and_resumed_publishes_the_same_adapters(tmp_path):
    """2 steps + stop + resume + 2 steps = 4 steps: the same hash of every version, though the base was built twice."""
    whole, parts = FakeBuffer(), FakeBuffer()
    assert await train(whole, lora_run(tmp_path / "whole")) == 0
    run = lora_run(tmp_path / "parts", trainer={"checkpoint_every": 100})
    async with rpc.Server("127.0.0.1", 0, parts.registrations) as server:
        first = Start(run, server.address)
        parts.on_event = lambda e: first.lifecycle.request_stop("SIGTERM") if e[:2] == ("publish", 2) else None
        parts.gate = lambda batch: "held" if batch > 2 else ""
        assert await first.code == 0
        parts.gate = lambda batch: ""
        assert await Start(run, server.address).code == 0
    one, other = [await published(tmp_path / n, FileStore(tmp_path / n / "objects")) for n in ("whole", "parts")]
    assert {s: {v.weights for v in found} for s, found in one.items()} == {
        s: {v.weights for v in found} for s, found in other.items()}
    assert len({v.weights for found in one.values() for v in found}) == 5


def test_what_contradicts_an_adapter_is_refused():
    """The base as the reference of a policy that was warmed up after it, and a critic, a second whole model."""
    with pytest.raises(ConfigError, match=r"trainer.warmup.steps = 5 with model.lora and algorithm.kl = k2"):
        lora_run(algorithm={"kl": "k2"}, trainer={"warmup": {"steps": 5}})
    with pytest.raises(ConfigError, match=r"model.lora with algorithm.advantage = gae"):
        lora_run(algorithm={"preset": "ppo"})


async def test_a_base_is_written_once_and_proved(tmp_path):
    """Two publishers of the same base write one object; a base that was tampered with, or another one, is not loaded."""
    store, learner = FileStore(tmp_path), Learner(lora_run())
    base = await write_base(store, learner.base())
    assert await write_base(store, Learner(lora_run()).base()) == base
    assert len(await store.list("bases/")) == 2
    other = await write_base(store, Learner(lora_run(run={"name": "test", "seed": 7})).base())
    assert other != base

    async def version(number: int, base: FileEntry) -> Any:
        return await write_version(
            store, run="test", number=number, step=0, incarnation=1, tensors=learner.weights(), files=learner.files(),
            base=base)

    manifest = await read_manifest(store, await version(1, base))
    complete = await read_complete(store, manifest)
    assert {t.name: bytes(t.data) for t in complete[: len(learner.base())]} == {t.name: bytes(t.data) for t in learner.base()}
    engine, context = SimpleNamespace(version=None), SimpleNamespace(store=store, run=lora_run(), channel=MagicMock())
    weights: Any = Weights(context, engine, MagicMock(), MagicMock(), MagicMock())  # pyright: ignore[reportArgumentType]
    weights._base = base
    assert len((await weights._read(await version(2, base)))[1]) == len(complete), "an engine that starts needs the base, too"
    engine.version = 2
    assert len((await weights._read(await version(3, base)))[1]) == len(learner.weights()), "a swap reads the adapter alone"
    with pytest.raises(InvalidInput, match="start the worker again"):
        await weights._read(await version(4, other))
    path = tmp_path / base.key
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(InvalidInput, match="not the base of version 1"):
        await read_complete(store, manifest)
