"""Rows with recorded routes."""

from __future__ import annotations

import numpy as np

from services.trainer.packing import Row


def row(length: int, seed: int, layers: int, experts: int, top_k: int) -> Row:
    """Of `length` inputs, the last of which is trained."""
    random = np.random.default_rng(seed)
    routes = np.argsort(random.random((length, layers, experts)))[..., :top_k].astype(np.uint8)
    return Row(
        random.integers(2, 9, length).astype(np.int32), np.array([length - 1]), np.array([3], np.int32),
        np.zeros(1, np.float32), np.zeros(1, np.int64), routes=routes, advantages=np.ones(1), weight=1.0)
