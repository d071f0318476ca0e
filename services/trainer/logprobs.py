"""Log-probabilities and entropies of trained tokens without ever holding [T, V].

Axes: M trained tokens, H hidden, V vocabulary.

Only the M trained positions reach the output embedding, in chunks whose logits are thrown away after the forward pass and
computed again in the backward pass. What fits into one chunk is computed the plain way, in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def log_probabilities(
    logits_M_V: torch.Tensor, targets_M: torch.Tensor, entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits)[target] with gradient, and the entropy of each distribution: two fp32 (or fp64) [M].

    The entropy has a gradient only when asked for: it costs another [M, V].
    """
    if logits_M_V.dtype not in (torch.float32, torch.float64):
        logits_M_V = logits_M_V.float()
    all_M_V = torch.log_softmax(logits_M_V, dim=-1)
    if entropy_gradient:
        entropy_M = -(all_M_V.exp() * all_M_V).sum(dim=-1)
    else:
        with torch.no_grad():
            entropy_M = torch.special.entr(all_M_V.exp()).sum(dim=-1)
    return all_M_V.gather(1, targets_M.unsqueeze(1)).squeeze(1), entropy_M


def chunked(
    hidden_M_H: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], targets_M: torch.Tensor, rows: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from hidden states, `rows` positions at a time; `head` maps [m, H] to logits [m, V]."""
    def part(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return log_probabilities(head(hidden), targets, entropy_gradient)

    if len(hidden_M_H) <= rows:
        return part(hidden_M_H, targets_M)
    parts: list[Any] = [
        checkpoint(part, hidden, targets, use_reentrant=False, preserve_rng_state=False)
        for hidden, targets in zip(hidden_M_H.split(rows), targets_M.split(rows), strict=True)]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def output_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Hidden states to logits as the model itself maps them: its output embedding, and what its family does afterwards.

    Families differ in three known settings: `final_logit_softcapping` (Gemma), `logits_scaling` (Granite: a divisor) and
    `logit_scale` (Cohere: a factor).
    """
    embedding, config = model.get_output_embeddings(), model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits = embedding(hidden)
        if factor != 1.0:
            logits = logits * factor
        return torch.tanh(logits / cap) * cap if cap else logits

    return head
