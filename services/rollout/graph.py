"""The fast decode pass as one compiled graph: transformers' own modules, traced once, without Python between their kernels.

Rows and length are symbols of the graph, so a pass of any width and length runs on the one that was compiled first; a pass has
at least two rows, because torch compiles a width of one apart. Weights, keys and values are inputs of the graph, found anew at
each call: they may be written, dropped and come back. Prompt passes, few and of many shapes, are not compiled.

Compiling takes 15 to 40 s for the demo's model; torch keeps the result on disk (`TORCHINDUCTOR_CACHE_DIR`, by default a folder
of the user in /tmp), and the next start takes a third of it.

Axes: B rows of a pass, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from services.rollout.kv import DecodePass, Masks, SlotCache
from slipstream.errors import ConfigError, InvalidInput


class DecodeGraph:
    """Calls the model for a decode pass. `backend` is torch.compile's."""

    def __init__(self, model: Any, cache: SlotCache, masks: Masks, backend: str = "inductor") -> None:
        """Raises ConfigError, naming it, when the C++ compiler is missing."""
        if backend == "inductor" and model.device.type == "cpu":
            _compiler()
        self.model, self.cache, self.masks = model, cache, masks
        self.compiled = 0  # graphs made so far
        compiler: Any = torch.compile  # its types know options with no backend but Inductor's
        self._run = compiler(
            self._pass, dynamic=True, fullgraph=True, isolate_recompiles=True, backend=backend,
            options={"guard_filter_fn": self._guards})

    def __call__(self, ids_B_1: torch.Tensor, step: DecodePass) -> torch.Tensor:
        """Logits [B, V]. Raises InvalidInput, naming the model's class, when torch cannot compile it as one graph."""
        if not self.compiled:
            for layer in self.cache.layers:
                torch._dynamo.mark_static(layer.keys)
                torch._dynamo.mark_static(layer.values)
        try:
            return self._run(ids_B_1, step.slots_B, step.positions_B, step.length)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())[:300]
            raise InvalidInput(
                f'{type(self.model).__name__} cannot be compiled: {reason}; set rollout.compile = "attention"', "COMPILE",
            ) from error

    def _pass(self, ids_B_1: torch.Tensor, slots_B: torch.Tensor, positions_B: torch.Tensor, length: int) -> torch.Tensor:
        self.cache.begin(DecodePass(slots_B, positions_B, length, True))
        positions_B_1 = positions_B[:, None]
        output = self.model(
            input_ids=ids_B_1, position_ids=positions_B_1, attention_mask=self.masks.of(positions_B_1, length),
            cache=self.cache, use_cache=True)
        self.cache.begin(None)
        return output.logits[:, -1]

    def _guards(self, entries: Sequence[Any]) -> list[bool]:
        """Which conditions are looked at before each pass: those of its arguments.

        Hundreds more are about the model, its configuration and this object, which do not change while they serve; looking at
        all takes as long as a tenth of a pass. Called once for each graph.
        """
        self.compiled += 1
        return [not (entry.is_global or entry.name == "self" or entry.name.startswith("self.")) for entry in entries]


def _compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            'rollout.compile = "all" needs a C++ compiler, and neither g++ nor clang++ is on PATH: install one '
            '(apt-get install g++), or set rollout.compile = "none"') from error
