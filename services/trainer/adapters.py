"""Training an adapter: what is attached, what a checkpoint of it holds, and the base as the reference of a KL term.

A checkpoint holds A, B, their moments and the hash of the base, which every start builds or loads again: another base than the
one that was trained on is refused.

Axes: M trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from services.trainer.snapshot import Snapshot
from slipstream import config
from slipstream.errors import ConfigError, InvalidInput
from slipstream.manifest import RawTensor

if TYPE_CHECKING:
    from services.trainer.packing import Microbatch
    from slipstream.adapters import Adapter

BASE = "base.sha256"

Score = Callable[["Microbatch"], tuple[torch.Tensor, torch.Tensor]]


def attached(model: Any, run: config.RunFile, base: Sequence[RawTensor] | None = None) -> Adapter | None:
    """The adapter of `model.lora`, now in the model; None without that table. `base`: see Adapter. Raises ConfigError."""
    if run.model.lora is None:
        return None
    try:
        from slipstream.adapters import attach
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.lora needs the package {error.name}: pip install 'slipstream[lora]'") from None
    return attach(model, run.model.lora, run.run.seed, base)


class Trained:
    """What a step changes, read like a module by services.trainer.snapshot: the adapter, and the hash of its base."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def state_dict(self, keep_vars: bool = False) -> dict[str, torch.Tensor]:
        return self._adapter.state_dict(keep_vars) | {BASE: _digest(self._adapter)}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self._adapter.named_parameters()


def check_base(adapter: Adapter, snapshot: Snapshot) -> None:
    """Raises InvalidInput when a checkpoint is of no adapter, or of one that was trained on another base."""
    if (base := snapshot.weights.get(BASE)) is None:
        raise InvalidInput(
            "the checkpoint is of a run without model.lora: remove that table, or take another run.name", "ADAPTER")
    if not torch.equal(base, _digest(adapter)):
        raise InvalidInput(
            f"the checkpoint's adapter was trained on the weights {base.numpy().tobytes().hex()[:16]}, model.path or "
            f"model.build now gives {adapter.digest[:16]}: bring back the former, or take another run.name", "ADAPTER_BASE")


def without(adapter: Adapter, score: Score) -> Score:
    """`score` of the base: the reference of a KL term needs no second model."""
    def scored(batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        with adapter.off():
            return score(batch)

    return scored


def _digest(adapter: Adapter) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(adapter.digest), np.uint8).copy())
