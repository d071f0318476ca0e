"""Sampling: one uniform number per token, a function of (seed, position) alone, through the inverse CDF.

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seeds_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """Uniform numbers in (0, 1), float64 [B], from uint64 seeds and token positions.

    SplitMix64 (as slipstream.seeds.mix) of the seed, then of its sum with the position: counter-based, so neither batch mates
    nor earlier draws matter. 32 bits of it are used: u <= 1 - 2^-33, which a float64 CDF never rounds up to its total.
    """
    mixed_B = _mix(_mix(seeds_B.astype(np.uint64)) + positions_B.astype(np.uint64))
    return ((mixed_B >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


def sample(
    logits_B_V: torch.Tensor, uniform_B: torch.Tensor, temperature_B: torch.Tensor | None, greedy_B: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [B], their log-probabilities float32 [B]) under softmax(logits / temperature), in fp32.

    The token is the first whose CDF exceeds the uniform. `temperature_B` None means 1, `greedy_B` None means nobody is greedy.
    """
    logits_B_V = logits_B_V.float()
    if temperature_B is not None:
        logits_B_V = logits_B_V / temperature_B[:, None]
    logprobs_B_V = torch.log_softmax(logits_B_V, dim=-1)
    cdf_B_V = torch.cumsum(logprobs_B_V.exp(), dim=-1, dtype=torch.float64)
    tokens_B = torch.searchsorted(cdf_B_V, uniform_B[:, None] * cdf_B_V[:, -1:], right=True)[:, 0]
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logits_B_V.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_B_V.gather(1, tokens_B[:, None])[:, 0]


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
