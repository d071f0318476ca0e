"""A device that is only counted: memory that torch takes while it is watched, on a CPU, as if it were a GPU's.

    device = StandIn()
    learner.ranks.accelerator = device
    device.adopt(learner.model)             # what was made before anybody watched
    with device.watching():
        learner.step(...)
        learner.leave_device()
    assert device.bytes == 0

A storage counts from the operation that made it until it is freed, whoever holds it: a parameter, an optimizer, a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.offload import Accelerator


class StandIn(Accelerator):
    """See the top. Copies to it are made of new memory, as between a GPU and its host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._seen: dict[int, StorageWeakRef] = {}
        self._paused = False

    @property
    def bytes(self) -> int:
        """Of every storage that counts and lives."""
        return sum(self.live)

    @property
    def live(self) -> list[int]:
        """Bytes of each storage that counts and lives, largest first."""
        found = []
        for ref in self._seen.values():
            if (storage := torch.UntypedStorage._new_with_weak_ptr(ref.cdata)) is not None and storage.nbytes():
                found.append(storage.nbytes())
        return sorted(found, reverse=True)

    def here(self, tensor: torch.Tensor) -> bool:
        ref = self._seen.get(_local(tensor).untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._paused = True
        try:
            return tensor.clone()
        finally:
            self._paused = False

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.clone()
        self.see(found)
        return found

    def settle(self) -> None:
        """Nothing to wait for."""

    def see(self, tensor: torch.Tensor) -> None:
        """Its storage counts from here on."""
        if not self._paused and _local(tensor).device.type == "cpu":
            storage = _local(tensor).untyped_storage()
            self._seen[storage._cdata] = StorageWeakRef(storage)

    def adopt(self, *models: nn.Module) -> None:
        """What was made before anybody watched."""
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                self.see(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Whatever torch makes inside counts."""
        with _Watch(self):
            yield


class _Watch(TorchDispatchMode):
    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        before = {_local(t).untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and _local(tensor).untyped_storage()._cdata not in before:
                self._device.see(tensor)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
