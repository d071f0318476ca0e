"""Models and optimizers between a device and host memory, for processes that take turns on the device (slipstream.devices).

Parameters stay the objects that they are, so optimizers, hooks and tied weights do not notice. A tensor that FSDP has sharded
goes with its shard; each rank moves its own. On a CPU the two places are one, and nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Accelerator:
    """The two places. Tests put another one in its place, whose bytes can be counted on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def here(self, tensor: torch.Tensor) -> bool:
        """Whether it has memory on the device."""
        return tensor.device.type != "cpu"

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in host memory, from CUDA in pinned memory: torch pins what `non_blocking` copies go to."""
        return tensor.to("cpu", non_blocking=True)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device."""
        return tensor.to(self.device, non_blocking=True)

    def settle(self) -> None:
        """Wait for the copies, and let the driver, and so other processes, have what torch has kept for itself."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


class Offload:
    """The models and optimizers of one process, on the device or away from it."""

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._moved: list[tuple[dict[str, Any], str]] = []  # of optimizers: what has to come back

    def model(self, model: nn.Module) -> None:
        """One more, or a module around one that is known already."""
        self._models = [m for m in self._models if all(m is not part for part in model.modules())] + [model]

    def trained(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, and the model whose parameters it moves."""
        self.model(model)
        self._optimizers.append(optimizer)

    def leave(self, accelerator: Accelerator) -> None:
        """Move everything to host memory: parameters, buffers, gradients, the state of optimizers."""
        for model in self._models:
            model._apply(lambda t: accelerator.to_host(t) if accelerator.here(t) else t)
        for state in (state for optimizer in self._optimizers for state in optimizer.state.values()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and accelerator.here(value):
                    state[name] = accelerator.to_host(value)
                    self._moved.append((state, name))
        accelerator.settle()

    def enter(self, accelerator: Accelerator) -> None:
        """The inverse of `leave`: what was on the device comes back."""
        for model in self._models:
            model._apply(accelerator.to_device)
        for state, name in self._moved:
            state[name] = accelerator.to_device(state[name])
        self._moved.clear()
        accelerator.settle()
