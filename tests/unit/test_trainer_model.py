"""The model of a run: built from a seed, sent as bytes, put together again; and what a wrong run file is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.model import build, character_tokenizer, files, load_state, skeleton, state, stop_token_ids
from tests.trainer_samples import EXACT, FAMILIES, run_file


def made(family: str = "qwen3_moe", deterministic: bool = False, seed: int = 0, dtype: Any = "float32", **extra: Any):
    settings = {**(FAMILIES | EXACT)[family], **extra}
    source = config.Model(build=config.Build(model_type=family, config=settings, tokenizer_chars="0123456789="), dtype=dtype)
    return build(source, seed, deterministic)


def test_one_token_per_character():
    """<pad> = 0, <eos> = 1, then the alphabet in its order; decoding joins without spaces; unknown characters are refused."""
    tokenizer = character_tokenizer("ab \n=")
    assert tokenizer.encode("a b\n=") == [2, 4, 3, 5, 6]
    assert tokenizer.decode([2, 4, 3, 1], skip_special_tokens=True) == "a b"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 7)
    assert stop_token_ids(tokenizer) == (1,)
    with pytest.raises(Exception, match="UNK"):
        tokenizer.encode("z")


def test_weights_are_a_function_of_the_seed():
    """The same seed gives the same weights, whatever the global random state and the kernel; another seed gives others."""
    torch.manual_seed(1)
    first, _ = made()
    torch.manual_seed(2)
    expected = torch.random.get_rng_state()
    second, _ = made(deterministic=True)
    assert torch.equal(torch.random.get_rng_state(), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(made(seed=1)[0].parameters()), next(first.parameters()))


@pytest.mark.parametrize("family", [*FAMILIES, *EXACT])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sent_and_put_together_again(family, dtype):
    """files + state → skeleton + load_state gives the same logits and the same tokenizer, in every family and type."""
    model, tokenizer = made(family, dtype=dtype)
    model.eval()
    sent = files(model, tokenizer)
    assert files(model, tokenizer) == sent, "equal models have equal files, so they are stored once"
    other, same_tokenizer = skeleton(sent, dtype)
    load_state(other, state(model))
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert same_tokenizer.encode("31=") == tokenizer.encode("31=")
    assert stop_token_ids(same_tokenizer, other) == (1,)


def test_tied_weights_travel_once():
    """The output embedding that is the input embedding has no tensor of its own."""
    tied, _ = made(tie_word_embeddings=True)
    names = [t.name for t in state(tied)]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert "lm_head.weight" in [t.name for t in state(made()[0])]


def test_state_is_a_snapshot():
    """The optimizer's next step does not show in what is being published."""
    model, _ = made()
    taken = state(model)
    before = bytes(taken[0].data)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert bytes(taken[0].data) == before


def test_load_state_is_all_or_nothing():
    """A missing, unexpected or misshapen tensor is named, and nothing is written."""
    model, _ = made()
    tensors = state(made(seed=5)[0])
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InvalidInput, match=r"lacks 1 tensors of the model, first model\.norm\.weight"):
        load_state(model, [t for t in tensors if t.name != "model.norm.weight"])
    with pytest.raises(InvalidInput, match="the model lacks, first extra"):
        load_state(model, [*tensors, type(tensors[0])("extra", "F32", (1,), b"\0\0\0\0")])
    misshapen = [*tensors[:-1], type(tensors[0])(tensors[-1].name, "F32", (1,), b"\0\0\0\0")]
    with pytest.raises(InvalidInput, match="shape"):
        load_state(model, misshapen)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_experts_equal_grouped_ones(family):
    """Same function, other kernel: outputs and gradients to 1e-5, also against the model's own loop over experts."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, 13, (4, 12)))
    found = []
    for deterministic, kernel in ((False, "grouped_mm"), (True, "dense"), (False, "eager")):
        model, _ = made(family, deterministic, initializer_range=0.2)
        model.set_experts_implementation(kernel)
        model(ids).logits.square().mean().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append({"logits": model(ids).logits.detach(), **gradients})
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def test_dense_rows_do_not_see_each_other():
    """At a fixed width a row's result is bitwise the same whatever stands in the other rows. grouped_mm's need not be."""
    model, _ = made(deterministic=True, initializer_range=0.2)
    experts = model.model.layers[0].mlp.experts
    random = torch.Generator().manual_seed(0)
    mine, chosen, weights = torch.randn(1, 32, generator=random), torch.tensor([[1, 3]]), torch.tensor([[0.4, 0.6]])
    results = set()
    for _ in range(20):
        rows, index = torch.randn(64, 32, generator=random), torch.rand(64, 4, generator=random).topk(2).indices
        shares = torch.rand(64, 2, generator=random)
        rows[17], index[17], shares[17] = mine[0], chosen[0], weights[0]
        results.add(experts(rows, index, shares)[17].detach().numpy().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(("settings", "message"), [
    ({"path": "/does/not/exist"}, "is not a directory"),
    ({"path": "."}, "has no weights"),
    ({"path": ".", "gguf_file": "nowhere.gguf"}, "name a GGUF file there"),
    ({"build": {"model_type": "qwen9_moe", "tokenizer_chars": "ab"}}, "qwen9_moe.* is unknown to transformers"),
    ({"build": {"model_type": "qwen3_moe"}}, "needs an alphabet"),
    ({"build": {"model_type": "qwen3_moe", "tokenizer_chars": "abca"}}, "'a' appears twice"),
    ({"build": {"model_type": "qwen3_moe", "tokenizer_chars": "ab", "config": {"vocab_size": 3}}}, "leave it out"),
    ({"build": {"model_type": "qwen3_moe", "tokenizer_chars": "ab", "config": {"hidden_size": "big"}}}, "hidden_size"),
])
def test_what_cannot_be_built_is_explained(settings, message, tmp_path, monkeypatch):
    """One line that names the setting and the remedy."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        build(config.Model(**settings), 0)
    assert "\n" not in caught.value.message


def test_a_saved_model_is_loaded_again(tmp_path):
    """`save_pretrained` of a trained model is a model.path like any other, and broken files are one line."""
    model, tokenizer = made()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = build(config.Model(path=str(tmp_path)), 0, deterministic=True)
    assert loaded.config._experts_implementation == "dense"
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build(run_file().model.model_copy(update={"path": str(tmp_path), "build": None}), 0)
