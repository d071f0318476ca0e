"""A model as a function from a micro-batch to log-probabilities of its trained tokens: the policy, a reference, a teacher.

Axes: R rows, T padded tokens, M trained tokens of a micro-batch, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from services.trainer.logprobs import chunked, output_head
from services.trainer.packed_attention import laid
from services.trainer.packing import Microbatch


class Scorer:
    """Only trained positions reach the model's output embedding, `logit_rows` of them at a time."""

    def __init__(self, model: Any, logit_rows: int) -> None:
        self._model, self._head, self._logit_rows = model, output_head(model), logit_rows
        self._index_M: torch.Tensor | None = None
        self._hidden_M_H: torch.Tensor | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._select)

    def __call__(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._model.device
        self._index_M = torch.from_numpy(batch.index).to(device)
        try:
            with laid(batch, device) as more:
                self._model(input_ids=torch.from_numpy(batch.inputs).to(device), use_cache=False, **more)
        finally:
            self._index_M = None
        targets_M = torch.from_numpy(batch.targets).to(device)
        hidden_M_H, self._hidden_M_H = self._hidden_M_H, None  # the graph has it: nothing of a step stays when it is over
        assert hidden_M_H is not None
        return chunked(hidden_M_H, self._head, targets_M, self._logit_rows, entropy_gradient)

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the output embedding: keep the trained positions, [R, T, H] -> [M, H], and let the model go on with none."""
        if self._index_M is None:
            return None
        hidden = inputs[0]
        self._hidden_M_H = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._index_M)
        return (hidden[:, :0], *inputs[1:])
