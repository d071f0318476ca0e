"""Adapters merged without PEFT are what slipstream.adapters merges with it, bit for bit, in every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.rollout.vllm_adapter import MergedAdapter, split
from slipstream import adapters
from slipstream.adapters import attach, merged_copy
from slipstream.config_sections import Lora
from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import ADAPTER_FILE, bare, state
from tests.engine_models import MOE, tiny


def adapted(family: str, dtype: torch.dtype = torch.float32, targets: tuple[str, ...] = ("attention", "experts")) -> Any:
    """(adapter whose A and B are random, tensors of its base, files)."""
    model = tiny(family).to(dtype)
    base = state(model)
    adapter = attach(model, Lora(rank=4, alpha=8, targets=targets), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapter, base, adapter.files()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*MOE, "llama"])
def test_the_merge_is_that_of_the_trainer_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    """Attention and experts, nested parameters and transposed ones; what is not adapted is the base's own memory."""
    adapter, base, files = adapted(family, dtype, ("attention", "experts") if family in MOE else ("attention", "down_proj"))
    merge = MergedAdapter(files, base, tiny(family).to("meta"))
    merged = {t.name: t for t in merge.merged(adapter.tensors())}
    expected = {name: bare(name, tensor.contiguous()) for name, tensor in merged_copy(adapter).items()}
    assert merged.keys() == {t.name for t in base} <= expected.keys()
    changed = [t.name for t in base if bytes(t.data) != bytes(merged[t.name].data)]
    assert len(changed) == len(adapter.state_dict()) // 2
    for name, tensor in merged.items():
        assert bytes(tensor.data) == bytes(expected[name].data), name
    assert all(merged[t.name] is t for t in base if t.name not in changed)


def test_a_second_version_starts_from_the_base_again() -> None:
    """Nothing of the first is in it, so swaps do not drift; the names of base and adapter tell them apart."""
    adapter, base, files = adapted("qwen3_moe")
    merge = MergedAdapter(files, base, tiny("qwen3_moe").to("meta"))
    own = adapter.tensors()
    first = [bytes(t.data) for t in merge.merged(own)]
    zero = [RawTensor(t.name, t.dtype, t.shape, bytes(t.size)) for t in own]
    assert [bytes(t.data) for t in merge.merged(zero)] == [bytes(t.data) for t in base]
    assert [bytes(t.data) for t in merge.merged(own)] == first
    assert split([*base, *own]) == (base, own) == adapters.split([*base, *own])


def without_last(own: list[RawTensor]) -> list[RawTensor]:
    return own[:-1]


def stranger(own: list[RawTensor]) -> list[RawTensor]:
    return [*own, RawTensor("base_model.model.lm_head.lora_A.weight", "F32", (1,), bytes(4))]


def short(own: list[RawTensor]) -> list[RawTensor]:
    return [RawTensor(own[0].name, own[0].dtype, own[0].shape, own[0].data[:-4]), *own[1:]]


def other_shape(own: list[RawTensor]) -> list[RawTensor]:
    return [RawTensor(own[0].name, "F32", (own[0].shape[0], 3), bytes(12 * own[0].shape[0])), *own[1:]]


@pytest.mark.parametrize("spoil", [without_last, stranger, short, other_shape])
def test_what_does_not_fit_is_refused_by_name(spoil: Callable[[list[RawTensor]], list[RawTensor]]) -> None:
    adapter, base, files = adapted("qwen3_moe")
    merge = MergedAdapter(files, base, tiny("qwen3_moe").to("meta"))
    with pytest.raises(InvalidInput, match="lora_|q_proj"):
        merge.merged(spoil(adapter.tensors()))


def test_an_adapter_of_another_model_is_refused() -> None:
    """At the start: names of layers that the model lacks, and a base without the weights."""
    _, base, files = adapted("qwen3_moe")
    told = json.loads(files[ADAPTER_FILE])
    for changed in ({"target_modules": ["model.layers.9.self_attn.q_proj"]}, {"target_parameters": ["model.x.experts.down"]}):
        with pytest.raises(InvalidInput, match="does not describe an adapter"):
            MergedAdapter({ADAPTER_FILE: json.dumps(told | changed).encode()}, base, tiny("qwen3_moe").to("meta"))
    with pytest.raises(InvalidInput, match="the base lacks"):
        MergedAdapter(files, base[:3], tiny("qwen3_moe").to("meta"))
