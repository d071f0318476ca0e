"""A decoder that sleeps: without the memory of its weights and of its cache, and with all that it needs to go on.

Weights come back from the tensors of the loaded version, which stay in host memory anyway. The sum of base and adapter has no
second copy: it is moved to host memory and back, which on a CPU is no move. Keys and values are kept in host memory, as far as
rows in flight have filled them, and a sequence goes on with the same bits; with `recompute_on_swap` they are dropped and
computed anew, but not by a deterministic decoder, whose bits may not depend on when it slept.

Axes: S slots, H key/value heads, C context, D head dim.
"""

from __future__ import annotations

import torch

from services.rollout.decoder import Decoder
from services.rollout.kv import SlotLayer
from slipstream.model import load_state
from slipstream.offload import Accelerator


class Asleep:
    """Puts a decoder to sleep when made. Until `wake` it may end requests (`Decoder.abort`), and nothing else."""

    @torch.no_grad()
    def __init__(self, decoder: Decoder, accelerator: Accelerator | None = None) -> None:
        self._decoder, self._accelerator = decoder, accelerator or Accelerator(decoder.device)
        self._keeps = decoder.deterministic or not decoder.recompute_on_swap
        used = int(decoder.rows.length[: decoder.active].max(initial=0))
        for layer in decoder.cache.layers:
            self._drop(layer, used)
        self._reloads = bool(decoder.loaded) and decoder.merged is None
        if self._reloads:
            self._shapes = [(parameter, parameter.shape) for parameter in decoder.model.parameters()]
            for parameter, _ in self._shapes:
                parameter.data = parameter.new_empty(0)
        else:
            decoder.model._apply(self._accelerator.to_host)
        self._accelerator.settle()

    @torch.no_grad()
    def wake(self) -> None:
        """Have everything back, and go on where it slept."""
        decoder = self._decoder
        if self._reloads:
            for parameter, shape in self._shapes:
                parameter.data = parameter.new_empty(shape)
            load_state(decoder.model, decoder.loaded)
        else:
            decoder.model._apply(self._accelerator.to_device)
        for layer in decoder.cache.layers:
            self._restore(layer)
        if not self._keeps:
            decoder.recompute()

    def _drop(self, layer: SlotLayer, used: int) -> None:
        """What is left of a layer's keys and values are those of the rows in flight, [rows, H, used, D], or nothing."""
        if layer.keys is None or layer.values is None:
            return
        rows = self._decoder.active
        if rows and self._keeps:
            layer.keys, layer.values = (
                self._accelerator.to_host(c[:rows, :, :used].clone()) for c in (layer.keys, layer.values))
        else:
            layer.keys = layer.values = None
            layer.is_initialized = False

    def _restore(self, layer: SlotLayer) -> None:
        """Room for every slot again, the kept keys and values in their places."""
        if layer.keys is None or layer.values is None:
            return
        kept = [self._accelerator.to_device(c) for c in (layer.keys, layer.values)]
        layer.lazy_initialization(*kept)
        for cache, old in zip((layer.keys, layer.values), kept, strict=True):
            cache[: len(old), :, : old.shape[2]] = old


def bytes_of(decoder: Decoder) -> int:
    """Bytes that weights and cache hold now."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(decoder) if t.numel()}
    return sum(storages.values())


def _tensors(decoder: Decoder) -> list[torch.Tensor]:
    caches = [c for layer in decoder.cache.layers for c in (layer.keys, layer.values) if c is not None]
    return [*decoder.model.parameters(), *caches]
