"""A model that is spread over ranks as a function from a micro-batch to log-probabilities. Collective.

Axes: R rows, T padded tokens, M trained tokens of a micro-batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.logprobs import log_probabilities
from services.trainer.packed_attention import laid
from services.trainer.packing import Microbatch
from services.trainer.parallel import mesh
from services.trainer.parallel.context import Context


class SpreadScorer:
    """As services.trainer.scorer.Scorer; but the output embedding runs inside the model's forward pass, where FSDP has its
    weights gathered, and so in one piece: [M, V] is held.
    """

    def __init__(self, model: Any, context: Context, device: torch.device) -> None:
        self._model, self._context, self._device = model, context, device
        self._index_M: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def __call__(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        part = self._context.part(batch)
        inputs, self._index_M, targets = (
            torch.from_numpy(a).to(self._device) for a in (part.batch.inputs, part.batch.index, part.batch.targets))
        positions = {} if part.positions is None else {"position_ids": part.positions.to(self._device)}
        try:
            with self._context.dividing(), laid(part.batch, self._device) as more:
                found = self._model(input_ids=inputs, use_cache=False, **positions, **more)
        finally:
            self._index_M = None
        logprobs_M, entropy_M = self._context.joined(
            part, *log_probabilities(mesh.whole(found.logits)[0], targets, entropy_gradient))
        return logprobs_M, entropy_M

    def _select(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output embedding: [R, T, H] -> [1, M, H], the trained positions."""
        if self._index_M is None:
            return None
        hidden = inputs[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._index_M)[None], *inputs[1:])
