"""Low-rank adapters (LoRA, arXiv 2106.09685) through PEFT: W' = W + (alpha / rank) B A on attention and on fused experts.

Only the trainer and engines that run transformers import this module; it needs the package peft, an extra. W, the base, never
changes. A and B are what is trained, checkpointed and published; their names are those of PEFT's adapter_model.safetensors.

The trainer applies attention adapters beside W, as x W + s (x A) B. The experts of transformers 5 are one 3-D parameter a
layer, which an expert kernel reads as a whole, so PEFT adds s B A to it in each forward pass: every kernel works, and a pass
holds a second copy of the experts.

An engine decodes thousands of passes with the same weights, so there `Merged` adds once a swap, to a copy of W that is kept:
never to the sum of the swap before, so nothing drifts and every version's weights are a function of (W, A, B). What is added to
bfloat16 is rounded to its 8 bits and small changes are lost; attention, which has another way, then stays beside W. The
experts' sum is PEFT's own in the trainer, the same bits.

Axes: E experts, O outputs, I inputs, r rank.
"""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from slipstream.config_sections import Lora
from slipstream.environment import nearest
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor, weights_digest
from slipstream.model import ADAPTER_FILE as FILE
from slipstream.model import load_state, raw, views
from slipstream.seeds import stream

PREFIX = "base_model.model."  # of the names in a PEFT directory
NAME = "default"
EXACT = (torch.float32, torch.float64)


class Adapter:
    """The adapter inside `model`, which keeps its class. Reads like the part of a module that is trained.

    `base`: the tensors of the model before the adapter; by default those of `model`, sharing its memory.
    """

    def __init__(self, model: Any, settings: LoraConfig, seed: int, base: Sequence[RawTensor] | None = None) -> None:
        self.base = views(model) if base is None else base
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(stream(seed, "lora"))
            self._peft: Any = get_peft_model(model, settings)
        self.model = model
        self.settings = settings
        self._parameters = {
            PREFIX + name.replace(f".{NAME}.", "."): parameter
            for name, parameter in model.named_parameters() if f".{NAME}." in name}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the base: slipstream.manifest.weights_digest."""
        return weights_digest(self.base)

    def state_dict(self, keep_vars: bool = False) -> dict[str, torch.Tensor]:
        """A and B of each layer, under the names of a PEFT directory."""
        return {n: p if keep_vars else p.detach() for n, p in self._parameters.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parameters.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        yield from self._parameters.values()

    def tensors(self) -> list[RawTensor]:
        """A snapshot of A and B."""
        return [raw(name, parameter) for name, parameter in self._parameters.items()]

    def load(self, tensors: Sequence[RawTensor]) -> None:
        """Write A and B, all or nothing. Raises InvalidInput as slipstream.model.load_state."""
        load_state(self, tensors)  # pyright: ignore[reportArgumentType]

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base."""
        with self._peft.disable_adapter():
            yield

    def files(self) -> dict[str, bytes]:
        """PEFT's description of the adapter, the same bytes in every process."""
        described = self.settings.to_dict() | {"inference_mode": True}
        return {FILE: json.dumps(described, indent=1, sort_keys=True, default=sorted).encode()}

    def save_pretrained(self, folder: Path, merged: bool = False) -> None:
        """Write a directory that peft.PeftModel.from_pretrained loads; with `merged`, an ordinary model with W' instead."""
        if merged:
            self.model.save_pretrained(folder, state_dict=merged_copy(self))
            return
        self._peft.save_pretrained(folder, save_embedding_layers=False)
        for name, data in self.files().items():
            (folder / name).write_bytes(data)


class Merged:
    """W' written into the model of an adapter, from a copy of W. See the top of this file for which layers."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        layers = [m for m in adapter.model.modules() if isinstance(m, LoraLayer)]
        self._layers = [(m, w, w.detach().clone()) for m in layers if (w := _weight(m)).dtype in EXACT or _fused(m)]

    def load(self, tensors: Sequence[RawTensor]) -> None:
        """Take over A and B. Raises InvalidInput, nothing changed, when they do not fit."""
        self.adapter.load(tensors)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Compute every W' anew."""
        for layer, weight, base in self._layers:
            weight.copy_(summed(layer, base))
            layer.merged_adapters = [NAME]


def attach(model: Any, settings: Lora, seed: int, base: Sequence[RawTensor] | None = None) -> Adapter:
    """An untrained adapter, which changes nothing yet: A is random from `seed`, B is 0. Only it is trainable from here on.

    `base`: see Adapter. Raises ConfigError for a target that is not in the model.
    """
    modules, parameters = _targets(model, settings.targets)
    return Adapter(model, LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",  # pyright: ignore
        target_modules=modules, target_parameters=parameters or None), seed, base)


def fused_targets(model: Any, settings: Lora) -> list[str]:
    """Full names of the fused expert parameters that an adapter would be attached to."""
    return _targets(model, settings.targets)[1]


def attach_sent(model: Any, files: Mapping[str, bytes]) -> Adapter:
    """The same from what came with a policy version; `Adapter.load` must follow. Raises InvalidInput."""
    try:
        return Adapter(model, LoraConfig(**json.loads(files[FILE])), 0)
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{FILE} does not describe an adapter of {type(model).__name__}: {error}", "ADAPTER") from error


def split(tensors: Sequence[RawTensor]) -> tuple[list[RawTensor], list[RawTensor]]:
    """(tensors of the base, tensors of the adapter)."""
    return [t for t in tensors if not t.name.startswith(PREFIX)], [t for t in tensors if t.name.startswith(PREFIX)]


def merged_copy(adapter: Adapter) -> dict[str, torch.Tensor]:
    """State of an ordinary model of the base's class with W' in place of W; the adapter goes on as it is."""
    summed_of = {_weight(m).data_ptr(): m for m in adapter.model.modules() if isinstance(m, LoraLayer)}
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in adapter.model.state_dict().items():
            if f".{NAME}." not in name:
                layer = summed_of.get(tensor.data_ptr())
                plain = name.replace(".base_layer", "")
                found[plain] = summed(layer, tensor) if layer is not None and tensor.ndim >= 2 else tensor
    return found


def summed(layer: Any, base: torch.Tensor) -> torch.Tensor:
    """W + s B A in the dtype of W; for experts by the very operation of PEFT's forward pass."""
    if _fused(layer):
        lhs, rhs, scale = layer.get_delta_factors(NAME)  # [E, O, r] [E, r, I], or their transposes
        return torch.baddbmm(base, lhs, rhs, alpha=scale)
    return base + layer.get_delta_weight(NAME).to(base.dtype)


def _fused(layer: object) -> bool:
    return isinstance(layer, ParamWrapper)


def _weight(layer: Any) -> torch.Tensor:
    return layer.get_param() if _fused(layer) else layer.get_base_layer().weight


def _targets(model: Any, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Full names of the linear layers and of the fused parameters that `model.lora.targets` asks for, in model order."""
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
    attention = {
        f"{name}.{inner}" for name, module in model.named_modules() if type(module).__name__.endswith("Attention")
        for inner, _ in module.named_modules()}
    fused = [
        f"{name}.{own}" for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")
        for own, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    modules: set[str] = set()
    parameters: set[str] = set()
    for target in targets:
        if target == "attention":
            some, more = [n for n in linear if n in attention], []
        elif target == "experts":
            some, more = [], fused
        else:
            some, more = ([n for n in names if f".{n}".endswith(f".{target}")] for names in (linear, fused))
        if not some and not more:
            known = sorted({n.rpartition(".")[2] for n in (*linear, *fused)})
            raise ConfigError(
                f"model.lora.targets: {type(model).__name__} has no layer {target!r} that an adapter fits; "
                f"{nearest(target, ['attention', 'experts', *known])}")
        modules, parameters = modules | set(some), parameters | set(more)
    return [n for n in linear if n in modules], [n for n in fused if n in parameters]
