"""Rows of a world whose routes lie in the object store, and what crosses between ranks for a row."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import distributed as dist

from services.trainer.packing import Row, trained_rows
from services.trainer.parallel import world
from services.trainer.parallel.world import World
from slipstream import config
from slipstream.errors import InvalidInput
from slipstream.objects import FileStore
from slipstream.protos.types.v1 import sample_pb2, tensor_pb2
from slipstream.sample import crc32c
from tests.trainer_samples import CHARS, FAMILIES, OBJECTIVE, groups, run_file, segment

LAYERS, EXPERTS = 2, 2


class Counted(FileStore):
    """Says what was read."""

    read: ClassVar[list[str]] = []

    async def get(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        Counted.read.append(f"{key}@{offset}")
        return await super().get(key, offset, size)


class _counted:
    def __init__(self, url: str, *_: Any) -> None:
        self._store = Counted(url.removeprefix("file://"))

    async def __aenter__(self) -> FileStore:
        return self._store

    async def __aexit__(self, *_: Any) -> None:
        return None


def run(folder: str) -> config.RunFile:
    build = {"model_type": "qwen3_moe", "tokenizer_chars": CHARS, "config": FAMILIES["qwen3_moe"]}
    return run_file(
        model={"build": build}, rollout={"capture_routes": True}, algorithm={"preset": "grpo", "route_replay": "sampler"},
        objects={"url": f"file://{folder}"}, trainer={"parallel": dict(ranks=2)})


def routes(row: Row) -> np.ndarray:
    """Some that tell which row they are of."""
    return np.full((len(row.inputs), LAYERS, EXPERTS), row.origin[0] * 4 + row.origin[1], np.uint8)


async def stored(folder: str, damaged: bool) -> list[Row]:
    """Rows of a batch, their routes in one object, by reference; the last is not what was recorded when `damaged`."""
    rows = trained_rows(groups(5, seed=1), 1, OBJECTIVE)
    parts = [routes(row).tobytes() for row in rows]
    await FileStore(folder).put("routes/all", b"".join(parts))
    found, offset = [], 0
    for row, data in zip(rows, parts, strict=True):
        reference = sample_pb2.Routes(dtype=tensor_pb2.DTYPE_UINT8, shape=(len(row.inputs), LAYERS, EXPERTS))
        reference.object.key, reference.object.offset, reference.object.size = "routes/all", offset, len(data)
        reference.object.crc32c = crc32c(data) + (damaged and row is rows[-1])
        found.append(replace(row, routes_ref=reference.SerializeToString()))
        offset += len(data)
    return found


def shared(folder: str, damaged: bool) -> dict[str, Any]:
    """On a rank: the rows that it got, whose routes are right, and what it read for them."""
    world.open_store = _counted
    made = World(run(folder))
    made._join()
    rows = asyncio.run(stored(folder, damaged)) if made.rank == 0 else []
    try:
        mine = made.shared(rows)
    except InvalidInput as error:
        return {"told": error.message}
    right = [row.origin for row in mine if row.routes is not None and np.array_equal(row.routes, routes(row))]
    return {"rows": [row.origin for row in mine], "right": right, "read": Counted.read, "rank": dist.get_rank()}


def bytes_per_token(tokens: int = 4096, prompt: int = 512, layers: int = 48, experts: int = 8) -> dict[str, float]:
    """What the scatter sends for a row of `tokens`, a token: without routes, with a reference to them, with them."""
    made = segment(range(prompt), [1] * (tokens - prompt), [-1.0] * (tokens - prompt))
    positions = np.flatnonzero(made.loss_mask)
    row = Row(
        made.tokens[:-1], positions - 1, made.tokens[positions], made.logprobs, np.zeros(len(positions), np.int64),
        advantages=np.zeros(len(positions)), weight=1.0)
    carried = np.zeros((tokens - 1, layers, experts), np.uint8)
    full = replace(row, routes=carried)
    return {name: len(pickle.dumps(value)) / tokens for name, value in (("plain", row), ("with routes", full))}

