"""Adapters for an engine that loads whole models: W + s B A, computed once a swap from a base that is kept.

The arithmetic is that of slipstream.adapters, bit for bit, but without the package peft, which the engine's environment lacks:
names and layout are those of PEFT's files, the model's outline says which parameters of its experts they belong to.

    base_model.model.<layer>.lora_A.weight [r, I], .lora_B.weight [O, r]                           a linear layer
    base_model.model.<experts>[.base_layer ...].lora_A.weight [E r, I], .lora_B.weight [O, r E]    a fused parameter

Of several adapted parameters of one module the last has the plain name, and each one before it one `.base_layer` more.

Axes: E experts, O outputs, I inputs, r rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import InvalidInput
from slipstream.manifest import RawTensor
from slipstream.model import ADAPTER_FILE, bare, cooked

PREFIX = "base_model.model."  # of the names in a PEFT directory
A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one adapter goes: the name of W, and how A and B become a difference of its shape."""

    weight: str
    experts: int = 0  # of a fused parameter; 0 = a linear layer
    transposed: bool = False  # a fused parameter [E, I, O]


def split(tensors: Sequence[RawTensor]) -> tuple[list[RawTensor], list[RawTensor]]:
    """(tensors of the base, tensors of the adapter)."""
    return [t for t in tensors if not t.name.startswith(PREFIX)], [t for t in tensors if t.name.startswith(PREFIX)]


class MergedAdapter:
    """Whole versions from versions of an adapter. `outline`: the model of the base, as an outline without memory."""

    def __init__(self, files: Mapping[str, bytes], base: Sequence[RawTensor], outline: Any) -> None:
        """Raises InvalidInput when the files do not describe an adapter of this model."""
        try:
            told = json.loads(files[ADAPTER_FILE])
            rank = float(told["r"])
            self._scale = float(told["lora_alpha"]) / (math.sqrt(rank) if told.get("use_rslora") else rank)
            self._places = places(told, outline)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{ADAPTER_FILE} does not describe an adapter: {error!r}", "ADAPTER") from error
        self._base = {t.name: t for t in base}
        if lost := [p.weight for p in self._places.values() if p.weight not in self._base]:
            raise InvalidInput(f"the base lacks {len(lost)} adapted weights, first {lost[0]}", "ADAPTER", tensor=lost[0])

    def merged(self, own: Sequence[RawTensor]) -> list[RawTensor]:
        """The tensors of the whole model, in the base's order; those that are not adapted are the base's own.

        Raises InvalidInput, naming the tensor, when A and B do not fit.
        """
        given, found = self._named(own), dict(self._base)
        with torch.no_grad():
            for name, place in self._places.items():
                weight = cooked(self._base[place.weight])
                try:
                    found[place.weight] = bare(place.weight, self._sum(place, weight, given[name + A], given[name + B]))
                except (RuntimeError, ValueError) as error:
                    raise InvalidInput(
                        f"adapter {name}: {given[name + A].shape} and {given[name + B].shape} do not fit "
                        f"{place.weight} {tuple(weight.shape)}: {error}", "ADAPTER", tensor=name) from error
        return list(found.values())

    def fits(self, own: Sequence[RawTensor]) -> None:
        """Raises InvalidInput, naming the tensor, when these are not the adapter's tensors."""
        given = self._named(own)
        for name, place in self._places.items():
            a, b, weight = given[name + A], given[name + B], self._base[place.weight]
            whole = len(a.data) == a.size and len(b.data) == b.size
            if not whole or (b.shape[0], a.shape[1], a.shape[0]) != (*weight.shape, b.shape[1]):
                raise InvalidInput(
                    f"adapter {name}: {a.shape} of {len(a.data)} bytes and {b.shape} of {len(b.data)} do not fit "
                    f"{place.weight} {weight.shape}", "ADAPTER", tensor=name)

    def _named(self, own: Sequence[RawTensor]) -> dict[str, RawTensor]:
        given = {t.name: t for t in own}
        expected = {name + part for name in self._places for part in (A, B)}
        if wrong := sorted(given.keys() ^ expected):
            what = "lacks" if wrong[0] in expected else "has an unexpected"
            raise InvalidInput(f"the version of the adapter {what} tensor {wrong[0]}", "ADAPTER", tensor=wrong[0])
        return given

    def _sum(self, place: Place, weight: torch.Tensor, a: RawTensor, b: RawTensor) -> torch.Tensor:
        """W + s B A in W's dtype, by the operations of slipstream.adapters.summed."""
        if len(a.data) != a.size or len(b.data) != b.size:
            raise ValueError(f"{len(a.data)} and {len(b.data)} bytes instead of {a.size} and {b.size}")
        matrix_a, matrix_b = cooked(a), cooked(b)
        if not place.experts:
            return (weight + (matrix_b @ matrix_a * self._scale).to(weight.dtype)).contiguous()
        right = matrix_a.reshape(place.experts, -1, matrix_a.shape[-1])  # [E, r, I]
        left = matrix_b.reshape(matrix_b.shape[0], -1, place.experts).permute(2, 0, 1)  # [E, O, r]
        if place.transposed:
            left, right = right.transpose(-2, -1), left.transpose(-2, -1)
        return torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=self._scale)


def places(told: Mapping[str, Any], outline: Any) -> dict[str, Place]:
    """Name of each adapter, without the ending for A or B, and where it goes. Raises KeyError for what the model lacks."""
    found: dict[str, Place] = {}
    modules = dict(outline.named_modules())
    for name in sorted(told["target_modules"] or ()):
        if name not in modules:
            raise KeyError(f"the model has no layer {name}")
        found[PREFIX + name] = Place(f"{name}.weight")
    targets: set[str] = set(told.get("target_parameters") or ())
    for name, module in modules.items():
        own = [(n, p) for n, p in module.named_parameters(recurse=False) if f"{name}.{n}" in targets]
        for depth, (parameter, value) in enumerate(reversed(own)):
            targets.remove(f"{name}.{parameter}")
            transposed = bool(getattr(module, "is_transposed", False))
            found[PREFIX + name + ".base_layer" * depth] = Place(f"{name}.{parameter}", value.shape[0], transposed)
    if targets:
        raise KeyError(f"the model has no parameter {min(targets)}")
    return found
