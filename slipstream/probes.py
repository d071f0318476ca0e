"""Probes of a policy version: token sequences with the log-probabilities that the trainer's model gives them.

They travel in the manifest. Whoever loads the version scores them again, before the version serves: an engine that scrambled
what it loaded answers otherwise. What it loaded but did not put to use is found by the checksums of the weights that it holds.

Axes: N sequences, T tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.errors import InvalidInput

# Most that log-probabilities may differ between two correct engines, in nats: (any one, on average). Measured gaps between
# engines are 1e-6 in float32; in bfloat16 0.01 on average with single tokens up to 0.4, where a router's choice is a tie.
TOLERANCES = {"float32": (2e-4, 5e-5), "bfloat16": (1.5, 0.06)}


@dataclass(frozen=True, slots=True, eq=False)
class Probes:
    """Sequences with their figures, and how many of the model's experts they visit."""

    tokens: np.ndarray  # int32 [N, T]
    logprobs: np.ndarray  # float32 [N, T - 1]: of tokens[:, 1:]
    experts_visited: int = 0  # of all layers together
    experts: int = 0

    def plain(self) -> dict[str, Any]:
        """As JSON values; float32 survives unchanged."""
        return {
            "tokens": self.tokens.tolist(), "logprobs": self.logprobs.astype(float).tolist(),
            "experts_visited": self.experts_visited, "experts": self.experts}

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Probes:
        """The inverse of `plain`. Raises ValueError or KeyError for what is none."""
        tokens, logprobs = np.array(plain["tokens"], np.int32), np.array(plain["logprobs"], np.float32)
        if tokens.ndim != 2 or logprobs.shape != (tokens.shape[0], tokens.shape[1] - 1):
            raise ValueError(f"probes of shape {tokens.shape} with log-probabilities of shape {logprobs.shape}")
        return cls(tokens, logprobs, int(plain["experts_visited"]), int(plain["experts"]))

    def judge(self, found: np.ndarray, dtype: str) -> float:
        """The largest gap, in nats, to the log-probabilities `found` [N, T - 1] by a model of `dtype`.

        Raises InvalidInput (CANARY) when they are not of the same weights.
        """
        most, mean = TOLERANCES[dtype]
        gaps = np.abs(found.astype(np.float64) - self.logprobs)
        if not (gaps.max() <= most and gaps.mean() <= mean):  # NaN is no agreement
            raise InvalidInput(
                f"{int((~(gaps <= most)).sum()) or gaps.size} of {gaps.size} probe tokens are scored otherwise than by the "
                f"trainer, by up to {gaps.max():.3g} nats (mean {gaps.mean():.3g}; {dtype} allows {most:g} and {mean:g}): the "
                "engine does not hold the published weights", "CANARY")
        return float(gaps.max())


def compare_checksums(published: Mapping[str, int], held: Mapping[str, int]) -> None:
    """CRC-32C by tensor. Raises InvalidInput (CANARY) naming what an engine holds in another state than was published."""
    if wrong := sorted(name for name, value in held.items() if published.get(name) != value):
        raise InvalidInput(
            f"the engine holds other bytes than were published in {len(wrong)} tensors, first {wrong[0]}", "CANARY",
            tensor=wrong[0])
    if missing := sorted(published.keys() - held.keys()):
        raise InvalidInput(
            f"the engine lacks {len(missing)} published tensors, first {missing[0]}", "CANARY", tensor=missing[0])
