"""From per-token losses to one number: the weight of each sample's tokens in the sum.

A loss is sum over all tokens of weight x l. The weights come from counts of the whole optimizer step, known before the first
backward pass, so the gradient is the same for every split into micro-batches, every packing, order and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np


def token_mean(tokens_S: np.ndarray, longest: int) -> np.ndarray:
    """1 / N, N = trained tokens of the step: [S]. DAPO (arXiv 2503.14476, section 3.3)."""
    return np.full(len(tokens_S), 1.0 / max(tokens_S.sum(), 1))


def sequence_sum(tokens_S: np.ndarray, longest: int) -> np.ndarray:
    """1 / S: the mean over samples of the sum over tokens: [S]. REINFORCE as in verl's seq-mean-token-sum."""
    return np.full(len(tokens_S), 1.0 / _samples(tokens_S))


def sequence_mean(tokens_S: np.ndarray, longest: int) -> np.ndarray:
    """1 / (S |o_i|): the mean over samples of the mean over tokens: [S]. GRPO (arXiv 2402.03300, equation 3)."""
    return 1.0 / (_samples(tokens_S) * np.maximum(tokens_S, 1))


def sequence_constant(tokens_S: np.ndarray, longest: int) -> np.ndarray:
    """1 / (S L), L = `longest`, the most tokens an answer may have: [S]. Dr. GRPO (arXiv 2503.20783, section 3.2)."""
    return np.full(len(tokens_S), 1.0 / (_samples(tokens_S) * longest))


def _samples(tokens_S: np.ndarray) -> int:
    """Samples that have a trained token; one that has none counts nowhere."""
    return max(int((tokens_S > 0).sum()), 1)


# Name in the run file -> weights.
WEIGHTS: Mapping[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "token_mean": token_mean, "sequence_sum": sequence_sum, "sequence_mean": sequence_mean,
    "sequence_constant": sequence_constant}
